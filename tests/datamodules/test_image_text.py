"""Pictures with texts: the real readers on generated files, and what is wrong with a list."""

import csv
import json
import pickle
import shutil

import pytest
import torch
from PIL import Image
from transformers import BertTokenizer

from datamodules import CaptionData, EntailmentData, GroundingData, VQAData
from datamodules.captions import plain, read_captions, read_picture, usable
from datamodules.grounding import read_refs
from datamodules.image_text_tasks import Asked, VQASet, vqa_scores
from datamodules.shapes import COLOURS, write

COUNTS = {"train": 12, "val": 5, "test": 4}
SMALL = {"image_size": 32, "batch_size": 4, "eval_batch_size": 3, "hflip": 0.0, "max_length": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write(folder, **COUNTS)
    return folder


def batches(data, part):
    loader = data.loader(data.samples(part), training=part == "train")
    return list(loader)


def test_captions_of_every_picture(folder):
    data = CaptionData(root=str(folder), **SMALL)
    training = batches(data, "train")
    assert len(training) == 12 * 2 // 4
    seen = torch.cat([batch["index"] for batch in training]).tolist()
    assert sorted(seen) == sorted(2 * list(range(12)))
    val = batches(data, "val")
    assert [batch["images"].shape for batch in val] == [(3, 3, 32, 32), (2, 3, 32, 32)]
    assert torch.cat([batch["text_index"] for batch in val]).tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]
    words = data.tokenizer.decode(val[0]["input_ids"][0], skip_special_tokens=True)
    assert words == data.entries("val")[0].captions[0]
    assert data.tokenizer.unk_token_id not in torch.cat([b["input_ids"].flatten() for b in val])


def test_generated_pictures_show_what_is_said(folder):
    """The colour in the box of "the red disc" is red."""
    data = GroundingData(root=str(folder), **SMALL)
    for entry in data.entries("test"):
        x, y, width, height = entry.box
        picture = Image.open(data.path(entry.image))
        centre = picture.getpixel((int(x + width // 2), int(y + height * 0.6)))
        assert centre == COLOURS[entry.text.split()[1]]
        assert entry.box in entry.candidates and len(entry.candidates) == 3


def test_flickr8k_in_its_own_parts(recipes_data):
    data = CaptionData(root=str(recipes_data / "flickr8k_1k"), **SMALL)
    sizes = {part: len(data.entries(part)) for part in ("train", "val", "test")}
    assert sizes == {"train": 800, "val": 100, "test": 100}
    assert all(len(entry.captions) == 5 for entry in data.entries("test"))


def test_lists_of_every_form_say_the_same(tmp_path):
    rows = [("a.jpg", "A dog, running."), ("a.jpg", "The dog\tof Bob"), ("b.jpg", "two cats")]
    (tmp_path / "captions.json").write_text(
        json.dumps([{"image": i, "caption": c} for i, c in rows])
    )
    with (tmp_path / "captions.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    lines = [f"{image}#{n}\t{caption}" for n, (image, caption) in enumerate(rows)]
    (tmp_path / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    several = [{"image": "a.jpg", "caption": [rows[0][1], rows[1][1]]}]
    several.append({"image": "b.jpg", "caption": ["two cats"]})
    (tmp_path / "several.json").write_text(json.dumps(several))
    names = ("captions.json", "captions.csv", "Flickr8k.token.txt", "several.json")
    lists = [read_captions(tmp_path / name) for name in names]
    assert all(one == lists[0] for one in lists)
    assert [(entry.image, len(entry.captions)) for entry in lists[0]] == [
        ("a.jpg", 2),
        ("b.jpg", 1),
    ]


def test_texts_are_written_plainly():
    text = "Two men - one old/tired; the <person>'s hat. A second sentence!"
    assert plain(text) == "two men one old tired the persons hat a second sentence"


def test_entailment(folder, tmp_path):
    data = EntailmentData(root=str(folder), **SMALL)
    entries = data.entries("val")
    assert len(entries) == 15 and [entry.label for entry in entries[:3]] == [2, 0, 1]
    [first, *_] = batches(data, "val")
    assert first["labels"].tolist() == [2, 0, 1] and first["images"].shape == (3, 3, 32, 32)
    # the official file: one line each, and "-" where people did not agree
    Image.new("RGB", (8, 8)).save(tmp_path / "123.jpg")
    # U+2028 ends a line for Unicode, but not for JSON Lines
    lines = [
        {"Flickr30K_ID": "123", "sentence2": "it\u2028rains", "gold_label": label}
        for label in ("neutral", "-", "entailment")
    ]
    (tmp_path / "snli_ve_dev.jsonl").write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    official = EntailmentData(root=str(tmp_path), tokenizer=str(folder / "tokenizer"), **SMALL)
    assert [(e.image, e.label) for e in official.entries("val")] == [("123.jpg", 1), ("123.jpg", 2)]
    assert official.entries("val")[0].text == "it\u2028rains"
    Image.new("RGB", (8, 8)).save(tmp_path / "own.webp")
    own = [{"image": "own.webp", "sentence": "it rains", "label": "neutral"}]
    (tmp_path / "ve_test.json").write_text(json.dumps(own))
    assert [entry.image for entry in official.entries("test")] == ["own.webp"]


def test_questions_and_their_answers(folder):
    data = VQAData(root=str(folder), **SMALL)
    batch = batches(data, "train")[0]
    assert batch["answer_row"].tolist() == [0, 1, 2, 3]
    assert batch["answer_weight"].tolist() == [1.0] * 4
    one = VQASet(data, [Asked("x.png", "how much?", 0, ("red-blue",))], training=True)
    collated = one.collate([{"image": torch.zeros(3, 8, 8), "entry": one.entries[0], "labels": 0}])
    assert collated["answer_weight"].tolist() == [0.5]  # as ALBEF weighs Visual Genome's
    raw = data.tokenizer("red-blue")["input_ids"]  # questions lose their punctuation, answers not
    assert collated["answer_ids"][0].tolist() == raw != data.tokenizer("red blue")["input_ids"]
    for batch in batches(data, "val"):
        assert batch["scores"].shape[1] == len(data.candidates) == len(batch["candidate_ids"])
        assert batch["scores"].sum(1).tolist() == [1.0] * len(batch["scores"])
    entry = data.entries("val")[0]
    chosen = data.candidates[int(batches(data, "val")[0]["scores"][0].argmax())]
    assert chosen == entry.answers[0]


def test_vqa_accuracy_by_hand():
    """min(others who said so / 3, 1), leaving each of ten people out in turn."""
    scores = vqa_scores(("red",) * 3 + ("blue",) * 1 + ("dark red",) * 6)
    assert scores["red"] == pytest.approx((3 * 2 / 3 + 7 * 1) / 10)
    assert scores["blue"] == pytest.approx((0 + 9 * 1 / 3) / 10)
    assert scores["dark red"] == 1.0
    assert vqa_scores(("yes",)) == {"yes": 1.0}


@pytest.mark.parametrize("people", range(1, 12))
def test_what_all_people_answer_is_right_however_few_they_are(people):
    assert vqa_scores(("yes",) * people) == {"yes": 1.0}


def test_of_two_people_who_disagree_both_are_half_right():
    assert vqa_scores(("yes", "no")) == {"yes": 0.5, "no": 0.5}


def test_a_rank_that_is_filled_up_says_so(folder):
    data = CaptionData(root=str(folder), **SMALL)
    samples = data.samples("val")
    sample = {**samples[0], "labels": -100}
    batch = samples.collate([samples[1], sample])
    assert batch["labels"].tolist() == [1, -100]
    assert batch["text_index"].tolist() == [1, 1, -100, -100]


@pytest.mark.parametrize("kind", [CaptionData, EntailmentData, GroundingData, VQAData])
def test_a_checkpoint_of_another_tokenizer_is_refused(kind, folder, tmp_path):
    """Two of its words have changed places, so that their number is the same."""
    *words, last, one = (folder / "vocab.txt").read_text().split()
    (tmp_path / "vocab.txt").write_text("\n".join([*words, one, last]))
    BertTokenizer(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "other")
    state = {"description": kind(root=str(folder), **SMALL).describe(), "module": "", "seed": 0}
    kind(root=str(folder)).load_state_dict(state)
    with pytest.raises(ValueError, match="another tokenizer, .*: set --data.tokenizer to the one"):
        kind(root=str(folder), tokenizer=str(tmp_path / "other")).load_state_dict(state)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_named(folder, limit):
    """-1 left out the last picture, and 0 all of them."""
    with pytest.raises(ValueError, match=f"limit is {limit}, expected 1 or more, or null for no"):
        CaptionData(root=str(folder), limit=limit)
    assert len(CaptionData(root=str(folder), limit=5).entries("train")) == 5


def test_bad_images_are_refused_or_left_out(folder, tmp_path, caplog):
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "torn.png").write_bytes(b"no picture")
    images = ("good.png", "torn.png", "gone.png")
    entries = [{"image": name, "caption": "a disc"} for name in images]
    (tmp_path / "captions.json").write_text(json.dumps(entries))
    settings = {"root": str(tmp_path), "tokenizer": str(folder / "tokenizer"), "val_fraction": 0.01}
    files = {"files": {"train": ["captions.json"]}}
    with pytest.raises(ValueError, match="2 of 3 images cannot be read: .*torn.png is unreadable"):
        CaptionData(**settings, **files).entries("train")
    skipping = CaptionData(**settings, **files, bad_images="skip")
    assert [entry.image for entry in skipping.entries("train")] == ["good.png"]
    assert "2 of 3 images left out" in caplog.text and "gone.png (missing)" in caplog.text
    with pytest.raises(ValueError, match="bad_images is 'ignore', expected refuse or skip"):
        CaptionData(bad_images="ignore")


def test_pictures_that_are_cut_short_are_found(tmp_path):
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    files = [tmp_path / f"{place}.{end}" for end in ("jpg", "png", "webp", "bmp") for place in "ab"]
    for place, file in enumerate(files):
        noise.save(file)
        if place % 2:
            content = file.read_bytes()
            file.write_bytes(content[: len(content) * 2 // 3])
    noise.save(tmp_path / "more.jpg")
    (tmp_path / "more.jpg").write_bytes((tmp_path / "more.jpg").read_bytes() + b"more")
    files.append(tmp_path / "more.jpg")  # a whole picture, with something behind it
    assert usable(files, "skip") == [True, False] * 4 + [True]
    for file, fit in zip(files, usable(files, "skip"), strict=True):
        if fit:
            read_picture(file)


def test_captions_without_splits_have_three_parts(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    entries = [{"image": "a.png", "caption": f"number {n}"} for n in range(3)]
    for n in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{n}.png")
        entries.append({"image": f"{n}.png", "caption": "a square"})
    (tmp_path / "captions.json").write_text(json.dumps(entries))
    data = CaptionData(root=str(tmp_path), val_fraction=0.25)
    parts = [{entry.image for entry in data.entries(part)} for part in ("train", "val", "test")]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 41
    assert min(map(len, parts)) >= 7


def test_training_pictures_change_as_albefs_do():
    """Two operations of magnitude 7: turned by 21°, moved by 7 pixels, brightened by 1.36, …."""
    steps = CaptionData(root=".", image_size=64).transform(training=True).transforms
    [augment] = [step for step in steps if type(step).__name__ == "RandAugment"]
    assert augment.num_layers == 2 and len(augment.ops) == 9
    arguments = {op.name: op.level_fn(7, op.hparams) if op.level_fn else () for op in augment.ops}
    values = {name: abs(given[0]) for name, given in arguments.items() if given}
    assert values == pytest.approx(
        {"Rotate": 21, "ShearX": 0.21, "ShearY": 0.21, "TranslateX": 7, "TranslateY": 7,
         "Brightness": 1.36, "Sharpness": 1.36}
    )  # fmt: skip
    # a tenth operation that does nothing, and a probability of one half
    assert all(op.prob == pytest.approx(0.5 * 9 / 10) for op in augment.ops)


def test_entries_without_what_they_need(folder, tmp_path):
    def lists(content, name="list.json"):
        (tmp_path / name).write_text(content)
        return {part: [str(tmp_path / name)] for part in ("train", "val")}

    data = VQAData(root=str(folder), files=lists('[{"image": "a.png", "answer": "yes"}]'))
    with pytest.raises(ValueError, match="entry 0 is .* expected one with image, question"):
        data.entries("train")
    data = GroundingData(root=str(folder), files=lists('[{"image": "a.png", "text": "x"}]'))
    with pytest.raises(ValueError, match="entry 0 is .* expected one with image, text, ref_id"):
        data.entries("val")
    data = EntailmentData(root=str(folder), files=lists('{"gold_label": "-"}\n{', "list.jsonl"))
    with pytest.raises(ValueError, match=r"list.jsonl, line 2: this is no JSON"):
        data.entries("train")


CAPTION, QUESTION = {"image": "a", "caption": "x"}, {"image": "a", "question": "x", "answer": "y"}


@pytest.mark.parametrize(
    ("kind", "content", "said"),
    [
        (CaptionData, [CAPTION | {"caption": None}], "entry 0: the caption is None, expected a"),
        (CaptionData, [CAPTION | {"caption": ["x", 3]}], "is .'x', 3., expected a text or a list"),
        (CaptionData, [CAPTION | {"caption": []}], "entry 0 .* expected one with an image and"),
        (CaptionData, [CAPTION | {"caption": ["x", " "]}], "a caption of a is ' ', expected"),
        (CaptionData, [CAPTION | {"image": 7}], "entry 0 .* expected one with an image and"),
        (CaptionData, {"images": []}, "holds no list but"),
        (VQAData, [QUESTION | {"answer": 3}], "entry 0: the answer is 3, expected a text"),
        (VQAData, [QUESTION | {"question": 5}], "entry 0: the question is 5, expected a text"),
        (VQAData, [QUESTION | {"question_id": "q7"}], "entry 0: the question_id is 'q7', expected"),
        (VQAData, [QUESTION | {"question_id": None}], "entry 0: the question_id is None, expected"),
        (VQAData, 5, "holds no list but '5'"),
        (EntailmentData, ["x"], "has the entry 'x', expected a sentence and a label"),
        (EntailmentData, {"a": 1}, "holds no list but"),
    ],
)
def test_what_is_no_text_is_named(kind, content, said, folder, tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(content))
    data = kind(root=str(folder), files={"train": [str(tmp_path / "list.json")]})
    with pytest.raises(ValueError, match=f"list.json.*{said}"):
        data.read("train")


def test_a_line_without_a_picture_is_named(tmp_path):
    (tmp_path / "captions.txt").write_text("a.jpg#0\ta dog\n\nb.jpg\ta cat\n")
    with pytest.raises(ValueError, match=r"captions.txt, line 3 is 'b.jpg.ta cat', expected"):
        CaptionData(root=str(tmp_path)).read("train")


def test_too_few_pictures_for_three_parts_are_said(tmp_path):
    (tmp_path / "captions.csv").write_text("image,caption\na.jpg,a dog\nb.jpg,a cat\n")
    with pytest.raises(ValueError, match="captions.csv names 2 images, expected three or more"):
        CaptionData(root=str(tmp_path)).read("train")
    with pytest.raises(ValueError, match="val_fraction is 5, expected a share from 0 to below 1"):
        CaptionData(root=str(tmp_path), val_fraction=5)


def test_lists_that_cannot_be_used(folder, tmp_path):
    (tmp_path / "captions.csv").write_text("caption,split\na dog,train\n")
    data = CaptionData(root=str(tmp_path))
    with pytest.raises(ValueError, match="has the columns caption, split, expected image and capt"):
        data.entries("train")
    (tmp_path / "captions.csv").write_text("image,caption\na.jpg,a dog, running\n")
    with pytest.raises(ValueError, match="line 2: the row has 3 columns, expected 2"):
        data.entries("train")
    (tmp_path / "captions.csv").write_text("image,caption\na.jpg,a dog\n")
    (tmp_path / "splits.csv").write_text("image,split\na.jpg,training\n")
    with pytest.raises(ValueError, match=r"no image of captions.csv into .* 'train' .*training"):
        data.entries("train")
    (tmp_path / "captions.json").write_text('[{"caption": "a dog"}]')
    with pytest.raises(ValueError, match="entry 0 is .* expected one with an image and a caption"):
        data.entries("train")
    (tmp_path / "captions.json").write_text("[{")
    with pytest.raises(ValueError, match=r"captions.json: this is no JSON"):
        data.entries("train")
    with pytest.raises(FileNotFoundError, match="missing, expected a list"):
        CaptionData(root=str(folder), files={"val": ["none.json"]}).entries("val")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has none of retrieval_train.json"):
        CaptionData(root=str(tmp_path / "empty")).entries("train")


def test_answer_lists_without_the_answers(folder, tmp_path):
    for answers, message in ((["left", "right"], "has none of the .* answers"), ([], "no answers")):
        (tmp_path / "list.json").write_text(json.dumps(answers))
        data = VQAData(root=str(folder), answer_list=str(tmp_path / "list.json"))
        with pytest.raises(ValueError, match=message):
            data.samples("val")
    (tmp_path / "vqa.json").write_text('[{"image": "a.png", "question": "why", "answer": []}]')
    data = VQAData(root=str(folder), files={"train": [str(tmp_path / "vqa.json")]})
    with pytest.raises(ValueError, match="entry 0, has no answer"):
        data.entries("train")


def test_pictures_that_no_part_has_are_counted(tmp_path):
    rows = "a.jpg,a dog\nb.jpg,a cat\nc.jpg,a cow\n"
    (tmp_path / "captions.csv").write_text(f"image,caption\n{rows}")
    (tmp_path / "splits.csv").write_text("image,split\na.jpg,train\nb.jpg,Train\n")
    with pytest.warns(UserWarning, match=r"2 of captions.csv's 3 images .* left out: 'b.jpg', 'c"):
        assert [one.image for one in CaptionData(root=str(tmp_path)).read("train")] == ["a.jpg"]


def test_an_answer_is_scored_however_it_is_written(folder, tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(["Blue", "T-shirt", "red"]))
    asked = Asked("images/00000.png", "what is it", 0, ("Red.", "t shirt", "red", "red"))
    data = VQAData(root=str(folder), answer_list=str(tmp_path / "list.json"), **SMALL)
    data._parts["val"] = [asked]
    [batch] = batches(data, "val")
    assert batch["scores"].tolist() == [[0.0, 0.25, pytest.approx(0.75)]]


def test_an_answer_that_is_listed_twice_is_one_candidate(folder, tmp_path):
    answers = json.loads((folder / "answer_list.json").read_text())
    (tmp_path / "list.json").write_text(json.dumps([*answers, *answers]))
    data = VQAData(root=str(folder), answer_list=str(tmp_path / "list.json"))
    assert data.candidates == answers


def test_boxes_of_another_version_are_said(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "refcoco+" / "dets.json").write_text("{}")
    with pytest.raises(ValueError, match="is not in instances.json or dets.json .* one version"):
        GroundingData(root=str(tmp_path / "copy")).entries("val")


def test_a_pickle_that_is_more_than_data_is_refused(tmp_path):
    (tmp_path / "refs.p").write_bytes(pickle.dumps([print]))
    with pytest.raises(ValueError, match="no pickle of plain lists .*builtins.print"):
        read_refs(tmp_path / "refs.p")


def test_more_pictures_than_there_are(tmp_path):
    with pytest.raises(ValueError, match="expected at most 672"):
        write(tmp_path, train=1000)
