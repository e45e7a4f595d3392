"""The settings that a user typed behind an experiment's command."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

TOP = ("trainer", "model", "data", "checkpoint", "seeding", "optimizer", "lr_scheduler")
OWNED = {  # settings that an experiment itself gives each stage → what to use instead
    "seed_everything": "--seeds N runs seeds 0 to N - 1",
    "seeding.seed": "--seeds N runs seeds 0 to N - 1",
    "data.seed": "--seeds N runs seeds 0 to N - 1",
    "ckpt_path": "the same command continues by itself",
    "trainer.default_root_dir": "--out DIR says where to",
    "checkpoint.dirpath": "--out DIR says where to",
    "config": "flags change settings, and a preset can be added to the YAML file",
    "c": "flags change settings, and a preset can be added to the YAML file",
}
CLASSES = ("model", "data")  # to vary one is to vary the class; a flag may change its settings
PASSING = (  # where and how a stage runs, which does not change its result
    "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.accelerator",
    "trainer.use_distributed_sampler", "trainer.enable_", "trainer.log_every", "trainer.logger",
    "trainer.default_root_dir", "checkpoint.dirpath", "data.num_workers", "config", "ckpt_path",
)  # fmt: skip
SEVERAL = ("trainer.devices", "trainer.num_nodes", "trainer.strategy")


@dataclass
class Flags:
    """A command line's settings.

    Attributes:
        given: (the file that a flag is limited to or "", key, argument) in their order.
    """

    given: list[tuple[str, str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "Flags":
        """Of a command line, `--key value` or `--key=value`.

        Raises:
            ValueError: naming an argument that is no flag, or one that the experiment sets itself.
        """
        given = []
        for key, value in _pairs(arguments):
            config, _, rest = key.partition(".")
            if config in TOP or not rest:
                config, rest = "", key
            if cure := OWNED.get(key_of(rest)):
                raise ValueError(f"--{key} is set by the experiment: {cure}")
            given.append((config, key_of(rest), f"--{rest}={value}"))
        return cls(given)

    def of(self, config: str) -> list[str]:
        """The arguments for the stages of a file."""
        return [argument for limit, _, argument in self.given if _fits(limit, config)]

    def refuse(self, config: str, varied: Iterable[str], has_rows: bool) -> None:
        """Refuse a flag that names what an experiment varies.

        Raises:
            ValueError: naming it.
        """
        for limit, key, argument in self.given:
            if not _fits(limit, config):
                continue
            for other in map(key_of, varied):
                inside = other.startswith(f"{key}.") and "{" in argument
                wider = key.startswith(f"{other}.") and other not in CLASSES
                if key == other or wider or inside:
                    choose = "rows with --rows" if has_rows else "parts with --only"
                    named = f"{other}, and --{key} with it" if wider else other
                    raise ValueError(f"this experiment varies {named}; choose {choose}")

    def refuse_unknown(self, configs: Collection[str]) -> None:
        """Refuse a flag that no stage would see.

        Raises:
            ValueError: naming it.
        """
        if self.given and not configs:
            raise ValueError(
                f"{self.given[0][2]}: this experiment trains nothing that has settings"
            )
        for limit, _, argument in self.given:
            if limit and not any(_fits(limit, config) for config in configs):
                known = ", ".join([*TOP[:4], *sorted(configs)])
                raise ValueError(
                    f"--{limit}.{argument[2:]} is no setting: expected one that begins with {known}"
                )

    def several(self) -> bool:
        """Whether the flags ask for several devices or nodes."""
        return any(key in SEVERAL for _, key, _ in self.given)


def key_of(key: str) -> str:
    """A setting's key in its short form: model.init_args.lr and model.lr are the same setting."""
    return key.removesuffix("+").replace(".init_args", "")


def passing(key: str) -> bool:
    """Whether a setting says where and how a stage runs, and leaves its result as it is."""
    return key_of(key).startswith(PASSING)


def _fits(limit: str, config: str) -> bool:
    """`--finetune.model.lr` is for the stages of finetune.yaml and of images_finetune.yaml."""
    return not limit or limit == config or config.endswith(f"_{limit}")


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    waiting = None
    for argument in arguments:
        key, equals, value = argument.lstrip("-").partition("=")
        if waiting is not None and not argument.startswith("--"):
            yield waiting, argument
            waiting = None
            continue
        if waiting is not None:
            raise ValueError(f"--{waiting} has no value")
        if not argument.startswith("-"):
            raise ValueError(f"{argument!r} is no flag: expected --key value")
        if equals:
            yield key, value
        else:
            waiting = key
    if waiting is not None:
        raise ValueError(f"--{waiting} has no value")


def names_in(text: str) -> list[str]:
    """The names in "a,b"."""
    return [name for name in text.split(",") if name]
