"""Image datasets of torchvision, which can read and download them."""

from typing import Any, NamedTuple

from PIL import Image
from torchvision import datasets

from datamodules.images import ImageData, Item, Splits
from datamodules.loading import require_choice


class Source(NamedTuple):
    """The number of classes, and the arguments of torchvision's class for each part (or None)."""

    num_classes: int
    train: dict[str, Any]
    val: dict[str, Any] | None
    test: dict[str, Any]


TRAIN, VAL, TEST = {"split": "train"}, {"split": "val"}, {"split": "test"}
SOURCES = {
    "CIFAR10": Source(10, {"train": True}, None, {"train": False}),
    "CIFAR100": Source(100, {"train": True}, None, {"train": False}),
    "DTD": Source(47, TRAIN, VAL, TEST),
    "FGVCAircraft": Source(100, TRAIN, VAL, TEST),
    "Flowers102": Source(102, TRAIN, VAL, TEST),
    "Food101": Source(101, TRAIN, None, TEST),
    "OxfordIIITPet": Source(37, {"split": "trainval"}, None, TEST),
    "STL10": Source(10, TRAIN, None, TEST),
    "SVHN": Source(10, TRAIN, None, TEST),
}


class TorchvisionData(ImageData):
    """A dataset by the name of its torchvision class, in the layout of torchvision.

    Datasets without a validation part validate on the test part unless `val_fraction` is set. DTD
    has ten official splits, of which the first is used.

    Args:
        dataset: CIFAR10, CIFAR100, DTD, FGVCAircraft, Flowers102, Food101, OxfordIIITPet, STL10
            or SVHN.
        download: whether `prepare_data` downloads missing files; root may then be a new folder.
        train_on_val: add the official validation part to the training part, as is usual for
            Aircraft, DTD and Flowers where nothing is chosen any more.
        **kwargs: see `ImageData`.

    Raises:
        ValueError: for an unknown dataset, or `train_on_val` where there is no validation part.
    """

    def __init__(
        self, dataset: str, download: bool = False, train_on_val: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        require_choice("dataset", dataset, SOURCES)
        if train_on_val and not SOURCES[dataset].val:
            raise ValueError(f"train_on_val is true, but {dataset} has no validation part.")
        self.dataset, self.download, self.train_on_val = dataset, download, train_on_val

    @property
    def num_classes(self) -> int:
        """The number of classes; does not need the files."""
        return SOURCES[self.dataset].num_classes if self.classes is None else len(self.classes)

    def prepare_data(self) -> None:
        if self.download:
            source = SOURCES[self.dataset]
            for part in filter(None, (source.train, source.val, source.test)):
                self._open(part, download=True)

    def load(self) -> Splits:
        source = SOURCES[self.dataset]
        train = self._open(source.train)
        names = getattr(train, "classes", None) or list(map(str, range(source.num_classes)))
        training = items_of(train)
        val = items_of(self._open(source.val)) if source.val else None
        if self.train_on_val and val:
            training, val = training + val, None
        return Splits(names, training, val, items_of(self._open(source.test)))

    def _open(self, part: dict[str, Any], download: bool = False) -> Any:
        try:
            return getattr(datasets, self.dataset)(self.folder, download=download, **part)
        except RuntimeError as error:
            raise FileNotFoundError(
                f"{self.dataset} {part} is not in {self.folder} ({error}): set --data.download "
                "true, or put the files there as torchvision lays them out."
            ) from error

    @staticmethod
    def read(source: tuple[Any, int]) -> Image.Image:
        dataset, index = source
        return dataset[index][0].convert("RGB")

    def name_of(self, source: tuple[Any, int]) -> str:
        """The index of an image in torchvision's dataset."""
        return str(source[1])


def items_of(dataset: Any) -> list[Item]:
    """The indices of a torchvision dataset with their labels; reads no image."""
    names = ("targets", "labels", "_labels")  # torchvision's classes differ in this
    labels = next(getattr(dataset, name) for name in names if hasattr(dataset, name))
    return [((dataset, place), int(label)) for place, label in enumerate(labels)]
