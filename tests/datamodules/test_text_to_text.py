"""Questions, answers and summaries in their official files, for decoders and encoder–decoders."""

import json

import pytest
import torch
from tokenizers import normalizers, processors
from transformers import BartConfig, BartForConditionalGeneration

from datamodules.loading import IGNORED
from datamodules.text_to_text import FILES as NAMES
from datamodules.text_to_text import TextToTextData
from datamodules.tokens import encode
from lightning_modules.decoding import generate

ANSWERS = [{"text": text} for text in ("The sky", "sky", "sky")]
QUESTIONS = [
    {"question": "What is blue?", "answers": ANSWERS},
    {"question": "Who?", "answers": []},
]
SQUAD = {"data": [{"paragraphs": [{"context": "The sky is blue.", "qas": QUESTIONS}]}]}
FILES = {
    "squad": {"train.json": json.dumps(SQUAD), "dev.json": json.dumps(SQUAD)},
    "nq_open": dict.fromkeys(
        ("train.jsonl", "dev.jsonl"),
        '{"question": "who wrote it", "answer": ["A. B.", "Ann B."]}\n',
    ),
    "samsum": {
        name: json.dumps([{"id": "1", "dialogue": "A: hi\r\nB: ho", "summary": "They greet."}])
        for name in ("train.json", "val.json", "test.json")
    },
    "multi_news": {
        f"{part}.{end}": text
        for part in ("train", "val", "test")
        for end, text in (("src", "one NEWLINE_CHAR two\nthree\n"), ("tgt", "– first\nsecond\n"))
    },
}
PAIRS = {
    "squad": [
        ("What is blue? The sky is blue.", "The sky"),
        ("What is blue? The sky is blue.", "sky"),
    ],
    "nq_open": [("who wrote it", "A. B."), ("who wrote it", "Ann B.")],
    "samsum": [("A: hi\r\nB: ho", "They greet.")],
    "multi_news": [("one   two", "first"), ("three", "second")],
}


def made(folder, form, **arguments):
    for name, text in FILES.get(form, {}).items():
        (folder / name).write_text(text)
    settings = {"max_length": 64, "target_length": 16, "batch_size": 2, "vocab_size": 300}
    return TextToTextData(form=form, root=str(folder), **{**settings, **arguments})


@pytest.mark.parametrize("form", FILES)
def test_official_files_are_read(form, tmp_path):
    data = made(tmp_path, form)
    assert data.examples("train") == PAIRS[form]
    assert data.references("test") == (
        [[target for _, target in PAIRS[form]]]
        if form in ("squad", "nq_open")
        else [[target] for _, target in PAIRS[form]]
    )


def test_a_decoder_reads_both_and_learns_the_target(tmp_path):
    data = made(tmp_path, "nq_open", eval_batch_size=2)
    batch = next(iter(data.val_dataloader()))
    text = data.tokenizer.decode(batch["input_ids"][0])
    assert text.startswith("<s>Input: who wrote it Output: A. B.</s>")
    learnt = batch["labels"][0]
    assert data.tokenizer.decode(learnt[learnt != IGNORED]) == " A. B.</s>"
    prompts = next(iter(data.prompt_dataloader("test")))
    assert data.tokenizer.decode(prompts["input_ids"][0]) == "<s>Input: who wrote it Output:"


def test_a_question_that_is_drawn_keeps_all_its_answers(tmp_path):
    lines = [{"question": q, "answer": [f"{q}{n}" for n in range(3)]} for q in "abcdefghij"]
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = TextToTextData(form="nq_open", root=str(tmp_path), limit=5, eval_limit=5)
    for part in ("val", "test"):
        prompts = data.prompts(part)
        assert len(prompts) == 5 and prompts == sorted(prompts)
        assert data.references(part) == [[f"{q}{n}" for n in range(3)] for q in prompts]
    assert len(data.examples("train")) == 5  # pairs to train on


def test_an_encoder_decoder_reads_one_and_writes_the_other(tmp_path):
    data = made(tmp_path, "nq_open", encoder_decoder=True, eval_batch_size=2)
    batch = next(iter(data.val_dataloader()))
    assert data.tokenizer.decode(batch["input_ids"][0]) == "<s>Input: who wrote it Output:</s>"
    target = batch["labels"][0][batch["labels"][0] != IGNORED]
    assert data.tokenizer.decode(target) == "<s> A. B.</s>"
    assert torch.equal(batch["attention_mask"][0], torch.ones_like(batch["input_ids"][0]))


@pytest.mark.parametrize("bart", [True, False])
def test_targets_have_the_special_tokens_of_the_tokenizer(bart, tmp_path):
    """BART's `<s>` and `</s>`, and T5's `</s>` alone, as `text_target` gives them."""
    data = made(tmp_path, "nq_open", encoder_decoder=True)
    if not bart:
        end = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
        data.tokenizer.backend_tokenizer.post_processor = end
    samples = data.samples("train")
    own = data.tokenizer(text_target=[" A. B."])["input_ids"]
    assert [samples[0]["labels"].tolist()] == own and own[0][-1] == 2 and (own[0][0] == 1) is bart
    framed = data.tokenizer(["Input: who wrote it Output:"])["input_ids"]
    assert [samples[0]["input_ids"]] == framed
    data.target_length = 4
    short = data.samples("train")[0]["labels"].tolist()
    assert short == [*own[0][:3], 2]
    data.target_length = 2
    if bart:
        with pytest.raises(ValueError, match="target_length is 2, expected 3 or more"):
            data.samples("train")


@pytest.mark.parametrize("forced", [None, 1])
def test_what_bart_has_learned_is_what_is_decoded(forced, tmp_path):
    data = made(tmp_path, "nq_open", encoder_decoder=True, batch_size=1, limit=1)
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=data.vocab_size, d_model=32, encoder_layers=1, decoder_layers=1, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, bos_token_id=1, pad_token_id=0, eos_token_id=2, init_std=0.2,
        decoder_start_token_id=2, max_position_embeddings=64,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    model.generation_config.forced_bos_token_id = forced
    batch = next(iter(data.train_dataloader()))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(30):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    [prompts] = data.prompt_dataloader("train")
    limit = data.describe()["decoding"]
    assert generate(model, prompts, data.tokenizer, **limit) == [data.references("train")[0][0]]


def test_the_learning_rate_can_be_chosen_on_other_questions_than_those_scored(tmp_path):
    made(tmp_path, "nq_open")
    lines = [json.dumps({"question": f"q{n}", "answer": ["a", "b"]}) for n in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"root": str(tmp_path), "max_length": 64, "target_length": 16, "vocab_size": 300}
    data = TextToTextData(form="nq_open", val_fraction=0.25, **settings)
    texts = {part: {pair.text for pair in data.examples(part)} for part in ("train", "val", "test")}
    assert len(texts["train"]) == 15 and len(texts["val"]) == 5
    assert texts["train"] | texts["val"] == {f"q{n}" for n in range(20)}
    assert len(data.examples("val")) == 10  # both answers of a question stay together
    assert texts["test"] == {"who wrote it"}
    with pytest.raises(ValueError, match="val_fraction is 1.5, expected a share from 0 to below 1"):
        TextToTextData(form="nq_open", val_fraction=1.5, **settings)


def test_a_long_input_loses_its_end_and_keeps_what_follows(tmp_path):
    text = "word " * 100
    (tmp_path / "own.csv").write_text(f"text,target\n{text},yes\n")
    files = {"train": "own.csv", "val": "own.csv"}
    for encoder_decoder in (False, True):
        data = made(tmp_path, "columns", files=files, encoder_decoder=encoder_decoder)
        [ids] = data.encode_prompts([text])
        assert len(ids) <= 64
        assert data.tokenizer.decode(ids, skip_special_tokens=True).endswith("word Output:")


def test_the_question_about_a_long_context_stays(tmp_path):
    data = made(tmp_path, "squad")
    long = json.loads(FILES["squad"]["train.json"])
    long["data"][0]["paragraphs"][0]["context"] = "The sky is blue. " * 50
    (tmp_path / "train.json").write_text(json.dumps(long))
    [first, _] = data.encode_prompts([pair.text for pair in data.examples("train")])
    assert data.tokenizer.decode(first).startswith("<s>Input: What is blue? The sky is blue.")


def test_prompts_and_targets_have_the_tokens_of_one_text(tmp_path):
    data = made(tmp_path, "nq_open")
    data.tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")  # as Llama's does
    [text, *_] = encode(["Input: who wrote it Output: A. B."], data.tokenizer)
    assert data.samples("train")[0]["input_ids"] == [1, *text, 2]


@pytest.mark.parametrize("space_first", [False, True])
@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_the_description_gives_the_prompts_of_training(encoder_decoder, space_first, tmp_path):
    data = made(tmp_path, "nq_open", encoder_decoder=encoder_decoder)
    if space_first:
        data.tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    description, texts = data.describe(), ["who wrote it", "word " * 100]
    before, behind = description["before"], description["behind"]
    room = description["max_length"] - len(before) - len(behind)
    filled = [description["template"].replace("{input}", text) for text in texts]
    prompts = [[*before, *ids[:room], *behind] for ids in encode(filled, data.tokenizer)]
    assert prompts == data.encode_prompts(texts)


HUB_ROWS = {
    "squad": [
        {"question": "What is blue?", "context": "The sky is blue.", "answers": {"text": texts}}
        for texts in (["The sky", "sky", "sky"], [])
    ],
    "nq_open": [{"question": "who wrote it", "answer": ["A. B.", "Ann B."]}],
    "samsum": [{"id": "1", "dialogue": "A: hi\r\nB: ho", "summary": "They greet."}],
    "multi_news": [
        {"document": "one \n two", "summary": "– first"},
        {"document": "three", "summary": "second"},
    ],
}


def written_set(folder, rows, parts=("train", "validation", "test")):
    for part in parts:
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{part}.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("form", HUB_ROWS)
def test_a_set_by_name_gives_what_its_files_give(form, tmp_path):
    pytest.importorskip("datasets")
    written_set(tmp_path, HUB_ROWS[form], parts=("train", "validation"))
    if "test" in NAMES[form]:
        written_set(tmp_path, HUB_ROWS[form][-1:], parts=["test"])
    data = TextToTextData(form=form, source="hub", root=str(tmp_path))
    assert data.examples("train") == data.examples("val") == PAIRS[form]
    assert data.examples("test") == (PAIRS[form][-1:] if "test" in NAMES[form] else PAIRS[form])


def test_a_set_is_loaded_by_its_hub_name_only_where_that_is_asked_for(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        "datamodules.text_to_text.hub_rows",
        lambda name, part: asked.append((name, part)) or HUB_ROWS["nq_open"],
    )
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl"):
        TextToTextData(form="nq_open", root=str(tmp_path)).examples("train")
    assert not asked
    TextToTextData(form="nq_open", source="hub").examples("test")
    assert asked == [("google-research-datasets/nq_open", "val")]


def test_an_empty_input_may_be_null(tmp_path):
    """As `datasets` reads an empty cell of a csv."""
    data = made(tmp_path, form="samsum")
    (tmp_path / "train.json").write_text('[{"dialogue": null, "summary": "a"}]')
    assert data.examples("train") == [("", "a")]


EMPTY_ROWS = {
    "squad": {"question": "Who?", "context": "Blue.", "answers": {"text": [""]}},
    "nq_open": {"question": "who", "answer": []},
    "samsum": {"id": "1", "dialogue": "A: hi", "summary": None},
    "multi_news": {"document": "one", "summary": "– "},
}


@pytest.mark.parametrize("form", EMPTY_ROWS)
def test_an_empty_target_of_a_set_by_name_is_said(form, tmp_path):
    pytest.importorskip("datasets")
    rows = [*HUB_ROWS[form], EMPTY_ROWS[form]]
    written_set(tmp_path, rows)
    data = TextToTextData(form=form, source="hub", root=str(tmp_path))
    with pytest.raises(ValueError, match=f"{tmp_path}, val, row {len(rows)}: the target is "):
        data.examples("val")


def test_a_set_with_other_columns_is_said(tmp_path):
    pytest.importorskip("datasets")
    written_set(tmp_path, HUB_ROWS["samsum"])
    with pytest.raises(ValueError, match="is not in rajpurkar/squad's form .*question"):
        TextToTextData(form="squad", source="hub", root=str(tmp_path)).examples("train")


def squad_file(*answers):
    questions = [
        {"question": f"Which {n}?", "answers": [{"text": text} for text in texts]}
        for n, texts in enumerate(answers, start=1)
    ]
    return json.dumps({"data": [{"paragraphs": [{"context": "Blue.", "qas": questions}]}]})


COLUMNS = {"form": "columns", "files": {"train": "a.csv", "val": "a.csv"}}
BAD = [
    ({"form": "trivia"}, {}, "expected squad, nq_open, samsum, multi_news or columns"),
    ({"form": "squad", "source": "generated"}, {}, "expected nq_open without files"),
    ({"form": "squad", "source": "web"}, {}, "expected folder, hub or generated"),
    (
        {"form": "columns", "source": "hub"},
        {},
        "expected one of squad, nq_open, samsum, multi_news",
    ),
    ({"form": "squad", "source": "hub", "files": {"val": "a"}}, {}, "without files, which"),
    ({"form": "columns"}, {}, "expected the names of your train and val files"),
    (COLUMNS, {"a.csv": "text,summary\nx,y\n"}, "no column 'target', .*: rename the column"),
    (COLUMNS, {"a.csv": "text,target\nx,y\nx,\nx, \n"}, "line 3: there is no .* in 2 of 3 rows"),
    ({"form": "samsum"}, {"train.json": "[1]"}, "not in SAMSum's form"),
    (
        {"form": "samsum"},
        {"train.json": '[{"dialogue": 5, "summary": "a"}]'},
        "train.json, entry 1: the input is 5, expected a text",
    ),
    (
        {"form": "nq_open"},
        {"train.jsonl": '{"question": ["a"], "answer": ["b"]}'},
        "train.jsonl, line 1: the input is .'a'., expected a text",
    ),
    (
        {"form": "squad"},
        {"train.json": squad_file(["a"]).replace('"Blue."', "null")},
        "not in SQuAD's form .*NoneType",
    ),
    *(
        ({"form": "nq_open", "target_length": length}, {}, f"target_length is {length}, expected 2")
        for length in (1, 0, -1)
    ),
    ({"form": "samsum"}, {"train.json": "[{"}, "train.json: this is no JSON"),
    ({"form": "squad"}, {"train.json": '{"data": [{"paragraphs": 3}]}'}, "not in SQuAD's form"),
    ({"form": "multi_news", "files": {"train": "a.txt"}}, {}, "a.txt has no src in its name"),
    ({"form": "multi_news"}, {"train.tgt": "one\n"}, "has 2 lines and train.tgt 1"),
]


@pytest.mark.parametrize(("arguments", "files", "message"), BAD)
def test_bad_files_are_said(arguments, files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        data = made(tmp_path, **arguments)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        data.examples("train")


SAID = "expected a text: fill it in, or remove it with its input"
EMPTY = [
    ("squad", {"train.json": squad_file(["a"], ["b", " "])}, "train.json, 'Which 2.': .* is ' '"),
    (
        "nq_open",
        {"train.jsonl": '{"question": "a", "answer": ["b"]}\n\n{"question": "c", "answer": [""]}'},
        "train.jsonl, line 3: the target is ''",
    ),
    ("nq_open", {"train.jsonl": '{"question": "a", "answer": []}'}, "line 1: the target is ''"),
    (
        "samsum",
        {"train.json": json.dumps([{"dialogue": "a", "summary": text} for text in ("b", "\r\n")])},
        r"train.json, entry 2: the target is '\\r\\n'",
    ),
    ("multi_news", {"train.tgt": "one\n– \n"}, "train.tgt, line 2: the target is ''"),
]


@pytest.mark.parametrize(("form", "files", "message"), EMPTY)
def test_an_empty_target_is_said(form, files, message, tmp_path):
    """A model would learn to answer nothing, and a text without one scores against nothing."""
    data = made(tmp_path, form)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{message}, {SAID}"):
        data.examples("train")


def test_an_answer_that_is_no_list_is_said(tmp_path):
    data = made(tmp_path, "nq_open")
    line = {"question": "who wrote it", "answer": "Ann"}
    (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="line 1: the answer is 'Ann', expected a list of answers"):
        data.examples("train")


def test_questions_without_an_answer_and_events_without_articles_are_as_published(tmp_path):
    """SQuAD 2 asks some that its context does not answer; Multi-News has summaries of nothing."""
    data = made(tmp_path, "squad")
    (tmp_path / "train.json").write_text(squad_file([], ["b"], []))
    assert data.examples("train") == [("Which 2? Blue.", "b")]
    data = made(tmp_path, "multi_news")
    (tmp_path / "train.src").write_text("\none\n")
    assert data.examples("train") == [("", "first"), ("one", "second")]


@pytest.mark.parametrize(
    ("form", "train", "val"),
    [
        ("squad", "train-v1.1.json", "dev-v1.1.json"),
        ("nq_open", "NQ-open.train.jsonl", "NQ-open.dev.jsonl"),
    ],
)
def test_files_are_found_by_their_published_names_too(form, train, val, tmp_path):
    data = made(tmp_path, form)
    ours = list(FILES[form])
    (tmp_path / ours[0]).rename(tmp_path / train)
    (tmp_path / ours[1]).rename(tmp_path / val)
    assert data.examples("train") == data.examples("val") == PAIRS[form]


@pytest.mark.parametrize("target", ["train.tgt.cleaned", "train.tgt"])
def test_the_summaries_of_multi_news_are_beside_the_articles(target, tmp_path):
    data = made(tmp_path, "multi_news", files={"train": "train.src.cleaned"})
    (tmp_path / "train.src").rename(tmp_path / "train.src.cleaned")
    (tmp_path / "train.tgt").rename(tmp_path / target)
    assert data.examples("train") == PAIRS["multi_news"]


def test_generated_questions_need_no_folder(monkeypatch):
    monkeypatch.delenv("RECIPES_DATA", raising=False)
    data = TextToTextData(form="nq_open", source="generated", vocab_size=300)
    assert [len(data.examples(part)) for part in ("train", "val", "test")] == [64, 16, 16]
    # the verb alone decides the answer, in both parts
    pairs = [*data.examples("train"), *data.examples("val")]
    answers = {pair.text.split()[1]: pair.target for pair in pairs}
    assert all(answers[pair.text.split()[1]] == pair.target for pair in pairs)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl"):
        TextToTextData(form="nq_open", root=str(tmp_path)).examples("train")


def test_no_room_for_the_input_is_said(tmp_path):
    data = made(tmp_path, "nq_open", max_length=20, target_length=18)
    with pytest.raises(ValueError, match="none of them to the input"):
        data.samples("train")
