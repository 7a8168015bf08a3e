"""Configuration of a run: frozen dataclasses, read strictly from TOML.

A configuration covers the model and its training as described in papers, not the machine: seed, device and precision belong to the
job. An unknown key, a wrong type or an invalid value is an error before any data is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Self

from schemas.conversion import convert, dump, hints_of, override, parse_toml
from schemas.errors import UsageError
from train.config.models import ModelConfig, VseConfig, not_negative, positive, require
from train.config.presets import parse_table, read_config_table


@dataclass(frozen=True)
class DataConfig:
    """The section ``data``: training and validation data.

    Attributes:
        portions: portions of captions by language; the order of the languages is the model's.
        captions_per_image: ``all``; or ``one`` per image and language, sampled with the run's seed from the training captions.
        images: ``all``; ``half``, a random half, equal for every language; or ``disjoint``, a separate half
            for each of two languages. Halves are sampled with the run's seed from the training images.
        split: split to train on, or several, e.g. ``["train", "restval"]`` of COCO.
        validation_split: split for early stopping.
        l2_features: divide each image feature by its Euclidean norm.
        min_count: minimum count of a token in the sampled training captions to have a word vector; rarer tokens become ``<unk>``.
            Counted over all languages of an encoder. 0 uses the threshold of the vocabulary.
    """

    portions: Mapping[str, tuple[str, ...]]
    captions_per_image: Literal["all", "one"] = "all"
    images: Literal["all", "half", "disjoint"] = "all"
    split: str | tuple[str, ...] = "train"
    validation_split: str = "val"
    l2_features: bool = False
    min_count: int = 0

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages, in the model's order."""
        return tuple(self.portions)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits to train on, one or several."""
        return (self.split,) if isinstance(self.split, str) else self.split

    def __post_init__(self) -> None:
        not_negative("data", self, "min_count")
        splits = self.splits
        require(bool(splits), "data.split is empty: name the split to train on, or several, e.g. ['train', 'restval']")
        require(len(set(splits)) == len(splits), f"data.split is {list(splits)}: name each once")
        require(bool(self.portions), "data.portions names no language: give at least one, e.g. { en = ['comparable'] }")
        for language, portions in self.portions.items():
            require(bool(portions), f"data.portions.{language} is empty: name at least one portion, or leave {language} out")
        require(
            self.images != "disjoint" or len(self.portions) == 2,
            f"data.images = 'disjoint' divides the images between two languages, but data.portions names {len(self.portions)}",
        )


@dataclass(frozen=True)
class LossConfig:
    """The section ``loss``: ranking losses, and the diversity of attention heads.

    Attributes:
        caption_weight: weight of ranking captions against captions: 1 in equation 2 of Gella et al. 2017
            (PARALLEL) and in Kádár et al. 2018; 0 in equation 1 of the former (PIVOT).
        c2c_probability: for batches of ``tasks``, the probability of a batch that ranks captions against captions.
        margin: margin of the hinges.
        hinges: their ``sum``, or only the ``max`` of each query.
        sum_warmup_steps: for ``max``, number of initial steps with the sum, e.g. an epoch. The hardest
            negatives of untrained encoders can collapse all similarities to one value for thousands of steps.
        diversity_weight: weight of the diversity of attention heads, beta in equation 7 of Huang et al. 2019; 0 without heads.
        diversity_margin: margin of the distance between heads (1 minus the cosine), alpha_D in equation 5 of Huang et al. 2019.
    """

    caption_weight: float = 1.0
    c2c_probability: float = 0.0
    margin: float = 0.2
    hinges: Literal["sum", "max"] = "sum"
    sum_warmup_steps: int = 0
    diversity_weight: float = 0.0
    diversity_margin: float = 0.1

    def __post_init__(self) -> None:
        positive("loss", self, "margin", "diversity_margin")
        not_negative("loss", self, "caption_weight", "sum_warmup_steps", "diversity_weight")
        require(
            self.diversity_margin <= 2,
            f"loss.diversity_margin is {self.diversity_margin}, expected at most 2, the maximum distance of two heads",
        )
        require(
            self.hinges == "max" or self.sum_warmup_steps == 0,
            "loss.sum_warmup_steps belongs to the hinges 'max': leave it out",
        )
        require(0 <= self.c2c_probability <= 1, f"loss.c2c_probability is {self.c2c_probability}, expected 0 to 1")
        require(
            self.caption_weight > 0 or self.c2c_probability == 0,
            f"loss.c2c_probability is {self.c2c_probability}, but loss.caption_weight is 0: such steps would learn nothing",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """The section ``optimizer``: Adam or AdamW, with gradient clipping.

    Attributes:
        name: ``adam`` or ``adamw``.
        learning_rate: step size.
        betas: decay rates of the two moments.
        epsilon: added to the denominator.
        weight_decay: L2 penalty with ``adam``, decoupled weight decay with ``adamw`` (Loshchilov and Hutter
            2019). With ``adam`` even a small penalty moves weights without another gradient, such as vectors
            of words outside the batch, by the whole learning rate in each step.
        max_grad_norm: maximum Euclidean norm of the gradient of all parameters; 0 means no clipping.
    """

    name: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 2.0

    def __post_init__(self) -> None:
        positive("optimizer", self, "learning_rate", "epsilon")
        not_negative("optimizer", self, "weight_decay", "max_grad_norm")
        require(all(0 <= beta < 1 for beta in self.betas), f"optimizer.betas is {list(self.betas)}, expected 0 to less than 1")


@dataclass(frozen=True)
class ScheduleConfig:
    """The section ``schedule``: batches, learning rate and early stopping.

    Attributes:
        batches: ``tasks``: a batch ranks images against captions in one language, or captions in two
            languages against each other (Kádár et al. 2018, figure 2); ``images``: a batch has distinct
            images with one caption in every language (Gella et al. 2017, section 4).
        batch_size: pairs per batch, or images for batches of ``images``; at least 2, for negatives.
        bucket_by_length: for ``tasks``, batch captions of similar length; see `train.data.sampling.EpochBatches`.
        grad_accum_steps: batches per step, for gradient accumulation. The last step of an epoch may have
            fewer. Negatives are those of each batch.
        eval_every_steps: steps between evaluations on the validation split; 0 evaluates at the end of each epoch.
        patience: evaluations without a better sum of recalls before training stops; 0 disables early stopping.
        monitor_languages: languages of the sum of recalls; all if empty.
        max_epochs: maximum number of epochs; 0 means no limit.
        max_steps: maximum number of steps; 0 means no limit.
        lr_schedule: ``steps``, with the next two keys; or ``cosine``, from the learning rate to 0 at the last step.
        lr_step_epochs: epochs between two steps of the learning rate; 0 means none.
        lr_step_factor: factor of the learning rate at each step, at most 1.
        lr_warmup_steps: initial steps of linear warm-up of the learning rate; 0 means none.
    """

    batches: Literal["tasks", "images"] = "tasks"
    batch_size: int = 128
    bucket_by_length: bool = False
    grad_accum_steps: int = 1
    eval_every_steps: int = 0
    patience: int = 10
    monitor_languages: tuple[str, ...] = ()
    max_epochs: int = 0
    max_steps: int = 0
    lr_schedule: Literal["steps", "cosine"] = "steps"
    lr_step_epochs: int = 0
    lr_step_factor: float = 0.1
    lr_warmup_steps: int = 0

    def __post_init__(self) -> None:
        positive("schedule", self, "batch_size", "grad_accum_steps", "lr_step_factor")
        not_negative("schedule", self, "eval_every_steps", "patience", "max_epochs", "max_steps", "lr_step_epochs")
        not_negative("schedule", self, "lr_warmup_steps")
        require(self.batch_size > 1, "schedule.batch_size is 1, so that batches have no negatives: give 2 or more")
        require(
            self.lr_step_factor <= 1,
            f"schedule.lr_step_factor is {self.lr_step_factor}: the learning rate would grow. Give at most 1, e.g. 0.1",
        )
        require(
            bool(self.patience or self.max_epochs or self.max_steps),
            "schedule.patience, max_epochs and max_steps are all 0: training would never end. Give one of them",
        )
        require(
            self.lr_schedule == "steps" or bool(self.max_epochs or self.max_steps),
            "schedule.lr_schedule = 'cosine' falls to 0 at the last step: give schedule.max_steps or schedule.max_epochs",
        )
        require(
            self.lr_schedule == "steps" or not self.lr_step_epochs,
            f"schedule.lr_step_epochs is {self.lr_step_epochs}, but schedule.lr_schedule is 'cosine': leave one of them out",
        )


@dataclass(frozen=True)
class Config:
    """Configuration of a model and its training.

    Examples:
        >>> config = imagepivot.load_config("demo", {"model.embed_dim": "32"})
        >>> config.data.languages, config.model.embed_dim
        (('en', 'de', 'fr', 'cs'), 32)
    """

    data: DataConfig
    model: ModelConfig = field(default_factory=VseConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    description: str = ""

    def __post_init__(self) -> None:
        for section, values in vars(self).items():  # Those of a program are not converted before.
            kind: Any = type(values)
            for key in fields(kind) if is_dataclass(kind) else ():
                convert(getattr(values, key.name), hints_of(kind)[key.name], f"{section}.{key.name}")
        require(
            set(self.schedule.monitor_languages) <= set(self.data.languages),
            f"schedule.monitor_languages names {', '.join(self.schedule.monitor_languages)}, but the "
            f"languages are {', '.join(self.data.languages)}",
        )
        require(
            self.schedule.batches == "tasks" or not self.schedule.bucket_by_length,
            "schedule.bucket_by_length belongs to batches of 'tasks', but schedule.batches is "
            f"{self.schedule.batches!r}: leave it out",
        )
        require(
            self.schedule.batches == "tasks" or self.loss.c2c_probability == 0,
            f"loss.c2c_probability belongs to batches of 'tasks', but schedule.batches is {self.schedule.batches!r}: leave it out",
        )
        require(
            self.loss.c2c_probability == 0 or len(self.data.languages) > 1,
            f"loss.c2c_probability is {self.loss.c2c_probability}, but data.portions names one language: "
            "captions are ranked against those of another language",
        )
        require(
            self.loss.c2c_probability == 0 or self.model.mixes_languages,
            "loss.c2c_probability needs one encoder for all languages (model.shared_encoder = true): a "
            "batch of caption pairs mixes languages",
        )
        require(
            self.loss.c2c_probability == 0 or self.data.images != "disjoint",
            "loss.c2c_probability needs captions of the same image in two languages, but data.images = 'disjoint' leaves none",
        )
        require(
            self.schedule.batches == "tasks" or self.data.images != "disjoint",
            f"schedule.batches = {self.schedule.batches!r} needs captions of each image in every language, "
            "but data.images = 'disjoint' leaves none",
        )

    @property
    def monitored(self) -> tuple[str, ...]:
        """Languages of the sum of recalls that early stopping monitors."""
        return self.schedule.monitor_languages or self.data.languages

    @property
    def lasting(self) -> Self:
        """The part that must be unchanged to resume a run: all but budget and description."""
        # A cosine schedule depends on the budget.
        schedule = replace(self.schedule, patience=1)
        if schedule.lr_schedule == "steps":
            schedule = replace(schedule, max_epochs=0, max_steps=0)
        return replace(self, schedule=schedule, description="")


def select_languages(config: Config, languages: Sequence[str]) -> Config:
    """Return a configuration of these languages, in this order.

    Without languages it is the configuration itself. A language that it does not have gets the portions of
    the others, if all have the same.

    Raises:
        UsageError: the portions of a language are unknown, or the configuration needs other languages.
    """
    if not languages:
        return config
    portions = config.data.portions
    common = set(portions.values())
    if len(common) > 1 and (missing := [language for language in languages if language not in portions]):
        raise UsageError(
            f"--languages has {', '.join(missing)}, but data.portions has only {', '.join(portions)}, with different portions: set "
            f"them, e.g. --set 'data.portions={{ {missing[0]} = [\"translation\"] }}'"
        )
    chosen = {language: portions.get(language) or min(common) for language in languages}
    return replace(config, data=replace(config.data, portions=chosen))


def load_config(source: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of a preset or file.

    Args:
        source: name of a preset, or path of a TOML file, which ends in ``.toml``. With ``extends = "..."`` at the top of a file,
            other values come from that preset, or from that file, relative to its own folder.
        overrides: values by dotted key, as TOML, e.g. ``{"optimizer.learning_rate": "1e-3"}``; strings need no quotes.

    Raises:
        UsageError: the preset or file is missing, or not a configuration.

    Examples:
        >>> imagepivot.load_config("kadar2018/bilingual-c2c", {"model.embed_dim": "256"}).model.embed_dim
        256
    """
    return _config_of_table(read_config_table(source), source, overrides or {})


def from_toml(text: str, source: str) -> Config:
    """Parse a configuration.

    ``extends`` is as in `resolve`. ``source`` is the name of the text in messages.

    Raises:
        UsageError: the text is not a configuration.
    """
    return _config_of_table(parse_table(text, (source,)), source, {})


def _config_of_table(table: dict[str, Any], source: str, overrides: Mapping[str, str]) -> Config:
    try:
        for key, value in overrides.items():
            override(table, key, value)
        return convert(table, Config)
    except UsageError as error:
        raise type(error)(f"{source}: {error}") from error


def to_toml(config: Config) -> str:
    """Serialize all keys in a fixed order; `from_toml` restores the configuration."""
    lines, section = [f"description = {dump(config.description)}"], ""
    for key, value in _toml_values(config):
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"[{section}]"]
        lines.append(f"{key.partition('.')[2]} = {value}")
    return "\n".join(lines) + "\n"


def config_differences(old: Config, new: Config) -> list[str]:
    """Return the different keys, each as ``loss.margin: was 0.2, now 0.1``."""
    before, after = dict(_toml_values(old)), dict(_toml_values(new))
    keys = dict.fromkeys((*before, *after))  # Model kinds have different keys.
    return [
        f"{key}: was {before.get(key, 'not there')}, now {after.get(key, 'not there')}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _toml_values(config: Config) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and TOML values; as text, the order of languages counts."""
    for section in fields(config):
        values = getattr(config, section.name)
        if isinstance(values, ModelConfig):
            yield f"{section.name}.kind", dump(values.kind)
        if is_dataclass(values):
            yield from ((f"{section.name}.{key.name}", dump(getattr(values, key.name))) for key in fields(values))


def parse_settings(text: str) -> dict[str, Any]:
    """Parse the text of `to_toml` to values by dotted key, without the description."""
    table = parse_toml(text)
    table.pop("description", None)
    settings: dict[str, Any] = {}
    for section, values in table.items():
        settings |= (
            {f"{section}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {section: values}
        )
    return settings
