"""The settings that a user gives as flags of an experiment's command."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

TOP = ("trainer", "model", "data", "checkpoint", "seeding", "optimizer", "lr_scheduler")
OWNED = {  # settings that the experiment sets for each stage → what the user can do instead
    "seed_everything": "--seeds N runs seeds 0 to N - 1",
    "seeding.seed": "--seeds N runs seeds 0 to N - 1",
    "data.seed": "--seeds N runs seeds 0 to N - 1",
    "ckpt_path": "the same command continues by itself",
    "trainer.default_root_dir": "--out DIR says where to",
    "checkpoint.dirpath": "--out DIR says where to",
    "checkpoint.save_last": "stages are continued and measured from their last checkpoint",
    "trainer.enable_checkpointing": "stages are continued and measured from their last checkpoint",
    "config": "flags change settings, and a preset can be added to the YAML file",
    "c": "flags change settings, and a preset can be added to the YAML file",
}
# varying one of these selects a class; flags may still change the settings of that class
CLASSES = ("model", "data")
# where and how a stage runs, which does not change its result; but for the number of devices, of
# which Stage.fingerprint takes account
PASSING = (
    "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.accelerator",
    "trainer.use_distributed_sampler", "trainer.enable_", "trainer.log_every", "trainer.logger",
    "trainer.default_root_dir", "checkpoint.dirpath", "data.num_workers", "config", "ckpt_path",
)  # fmt: skip
SEVERAL = ("trainer.devices", "trainer.num_nodes", "trainer.strategy")


@dataclass
class Flags:
    """The flags of a command line that are settings.

    Attributes:
        given: for each flag, in order: the file that it is limited to or "", key, argument.
    """

    given: list[tuple[str, str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "Flags":
        """Read the flags of a command line, `--key value` or `--key=value`.

        Raises:
            ValueError: an argument is no flag, or is a setting that the experiment controls.
        """
        given = []
        for key, value in _pairs(arguments):
            config, _, rest = key.partition(".")
            if config in TOP or not rest:
                config, rest = "", key
            if alternative := OWNED.get(key_of(rest)):
                raise ValueError(f"--{key} is set by the experiment: {alternative}")
            given.append((config, key_of(rest), f"--{rest}={value}"))
        return cls(given)

    def of(self, config: str) -> list[str]:
        """The arguments that apply to the stages of a file."""
        return [argument for limit, _, argument in self.given if _fits(limit, config)]

    def refuse(self, config: str, varied: Iterable[str], has_rows: bool) -> None:
        """Refuse a flag for a setting that the experiment varies.

        Raises:
            ValueError: there is such a flag; the message names it.
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
        """Refuse a flag that applies to no stage.

        Raises:
            ValueError: there is such a flag; the message names it.
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
    """Whether a setting is in PASSING, so that it does not change a stage's result."""
    return key_of(key).startswith(PASSING)


def _fits(limit: str, config: str) -> bool:
    """Whether a limit covers a file: `finetune` covers finetune.yaml and images_finetune.yaml."""
    return not limit or limit == config or config.endswith(f"_{limit}")


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    pending_key = None
    for argument in arguments:
        key, equals, value = argument.lstrip("-").partition("=")
        if pending_key is not None and not argument.startswith("--"):
            yield pending_key, argument
            pending_key = None
            continue
        if pending_key is not None:
            raise ValueError(f"--{pending_key} has no value")
        if not argument.startswith("-"):
            raise ValueError(f"{argument!r} is no flag: expected --key value")
        if equals:
            yield key, value
        else:
            pending_key = key
    if pending_key is not None:
        raise ValueError(f"--{pending_key} has no value")


def names_in(text: str) -> list[str]:
    """The names in "a,b"."""
    return [name for name in text.split(",") if name]
