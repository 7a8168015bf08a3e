"""The configuration of a run: frozen dataclasses, read strictly from TOML.

A configuration covers everything that the papers say about a model and its training, and nothing about the machine: seed, device
and precision belong to the run. An unknown key, a wrong type or an impossible value is an error before any data is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from schemas.conversion import convert, dump, override, parse_toml
from schemas.errors import UsageError
from train.config.models import ModelConfig, VseConfig, check_choices, not_negative, positive, require
from train.config.presets import extended, read_table


@dataclass(frozen=True)
class DataConfig:
    """The section ``data``: what to train on.

    Attributes:
        portions: for each language, the portions whose captions are used; the order of the languages is the model's.
        captions_per_image: ``all``, or ``one``: one caption for each image and language, drawn with the run's seed. This applies
            to training captions only; the stopping criterion uses all captions.
        images: ``all``; ``half``: a random half, the same one for every language; ``disjoint``: a separate half for each of two
            languages. Halves are drawn with the run's seed, from the training images only.
        split: the split to train on, or several, e.g. ``["train", "restval"]`` of COCO.
        validation_split: the split that the stopping criterion is measured on.
        l2_features: divide each image feature by its Euclidean norm.
        min_count: occurrences that a token needs in the training captions, as drawn, to have a word vector; rarer ones are read as
            ``<unk>``. Counted over all languages that share an encoder. 0 leaves it to the vocabulary.
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
        check_choices("data", self)
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
    """The section ``loss``: what to minimise.

    The ranking loss of images and their captions, plus, where a batch holds captions in several languages, that of captions and
    captions; which batches there are is said by ``schedule.batches``.

    Attributes:
        caption_weight: weight of ranking captions against captions: 1 in equation 2 of Gella et al. 2017 (PARALLEL) and in Kádár et
            al. 2018; 0 in equation 1 of the former (PIVOT), which ranks them against images only.
        c2c_probability: for batches of ``tasks``, the probability that a step ranks captions against captions.
        margin: margin of the hinges.
        hinges: their ``sum``, or only the ``max`` of each query.
        sum_warmup_steps: for ``max``, the number of initial steps with the sum. The hardest negatives of untrained encoders can
            collapse all similarities to one value, which costs thousands of steps; about an epoch with the sum leads past it.
        diversity_weight: weight of keeping the attention heads of an image or caption apart, beta in equation 7 of Huang et al.
            2019; 0 for models without heads.
        diversity_margin: distance, 1 less the cosine, up to which two heads are pushed apart, alpha_D in its equation 5.
    """

    caption_weight: float = 1.0
    c2c_probability: float = 0.0
    margin: float = 0.2
    hinges: Literal["sum", "max"] = "sum"
    sum_warmup_steps: int = 0
    diversity_weight: float = 0.0
    diversity_margin: float = 0.1

    def __post_init__(self) -> None:
        check_choices("loss", self)
        positive("loss", self, "margin", "diversity_margin")
        not_negative("loss", self, "caption_weight", "sum_warmup_steps", "diversity_weight")
        require(
            self.diversity_margin <= 2,
            f"loss.diversity_margin is {self.diversity_margin}, expected at most 2, the greatest distance that two heads can have",
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
    """The section ``optimizer``: Adam or AdamW, and the clipping of gradients before it.

    Attributes:
        name: ``adam`` or ``adamw``.
        learning_rate: step size.
        betas: decay rates of the two moments.
        epsilon: added to the denominator.
        weight_decay: L2 penalty: ``adam`` adds the weights times this to the gradient; ``adamw`` subtracts them times the learning
            rate from the weights (Loshchilov and Hutter 2019). Adam divides a gradient by its size: added to it, even a small decay
            moves weights that have no other gradient, such as the vectors of words that are not in the batch, by the whole learning
            rate at each step.
        max_grad_norm: maximum Euclidean norm of the gradient of all parameters together; 0 means no clipping.
    """

    name: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 2.0

    def __post_init__(self) -> None:
        check_choices("optimizer", self)
        positive("optimizer", self, "learning_rate", "epsilon")
        not_negative("optimizer", self, "weight_decay", "max_grad_norm")
        require(all(0 <= beta < 1 for beta in self.betas), f"optimizer.betas is {list(self.betas)}, expected 0 to less than 1")


@dataclass(frozen=True)
class ScheduleConfig:
    """The section ``schedule``: batches, evaluations, and when to stop.

    Attributes:
        batches: ``tasks``: each batch is one task, either images against the captions in one language, or captions in two languages
            against each other (Kádár et al. 2018, figure 2); ``images``: each batch is distinct images with one caption in every
            language (Gella et al. 2017, section 4).
        batch_size: pairs per batch; for batches of ``images``, images per batch. At least 2: the others of a batch are the
            negatives.
        bucket_by_length: for ``tasks``, put captions of similar length into a batch, which then takes fewer time steps; see
            `train.data.sampling.EpochBatches`.
        grad_accum_steps: number of batches whose gradients are added up for a step, after which steps, epochs, learning rates and
            evaluations count; the last step of an epoch takes what is left. Negatives are those of each batch.
        eval_every_steps: steps between two evaluations on the validation split; 0 means one at the end of each epoch.
        patience: number of evaluations without a better sum of recalls after which training stops; 0 means never.
        monitor_languages: languages whose recalls are added up; all if empty.
        max_epochs: maximum number of epochs; 0 means no limit.
        max_steps: maximum number of steps; 0 means no limit.
        lr_schedule: how the learning rate falls: in ``steps``, as the next two keys say; or as a ``cosine`` from its value at the
            first step to 0 at the last.
        lr_step_epochs: number of epochs after which the learning rate falls, again and again; 0 means never.
        lr_step_factor: factor by which the learning rate falls, at most 1.
        lr_warmup_steps: number of initial steps over which the learning rate grows linearly to its value; 0 means none.
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
        check_choices("schedule", self)
        positive("schedule", self, "batch_size", "grad_accum_steps", "lr_step_factor")
        not_negative("schedule", self, "eval_every_steps", "patience", "max_epochs", "max_steps", "lr_step_epochs")
        not_negative("schedule", self, "lr_warmup_steps")
        require(
            self.batch_size > 1,
            "schedule.batch_size is 1: a batch of one has no negatives, so that nothing would be learned. Give 2 or more",
        )
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
    """Everything that defines a model and its training, and a line for people, e.g. the row of a paper's table."""

    data: DataConfig
    model: ModelConfig = field(default_factory=VseConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    description: str = ""

    def __post_init__(self) -> None:
        require(
            set(self.schedule.monitor_languages) <= set(self.data.languages),
            f"schedule.monitor_languages names {', '.join(self.schedule.monitor_languages)}, but the languages are "
            f"{', '.join(self.data.languages)}",
        )
        require(
            self.schedule.batches == "tasks" or not self.schedule.bucket_by_length,
            f"schedule.bucket_by_length belongs to batches of 'tasks', but schedule.batches is {self.schedule.batches!r}: leave it "
            "out",
        )
        require(
            self.schedule.batches == "tasks" or self.loss.c2c_probability == 0,
            f"loss.c2c_probability belongs to batches of 'tasks', but schedule.batches is {self.schedule.batches!r}: leave it out",
        )
        require(
            self.loss.c2c_probability == 0 or len(self.data.languages) > 1,
            f"loss.c2c_probability is {self.loss.c2c_probability}, but data.portions names one language: captions are ranked "
            "against those of another language",
        )
        require(
            self.loss.c2c_probability == 0 or self.model.mixes_languages,
            "loss.c2c_probability needs one encoder for all languages (model.shared_encoder = true): a batch of caption pairs "
            "mixes languages",
        )
        require(
            self.loss.c2c_probability == 0 or self.data.images != "disjoint",
            "loss.c2c_probability needs captions of the same image in two languages, but data.images = 'disjoint' leaves none",
        )
        require(
            self.schedule.batches == "tasks" or self.data.images != "disjoint",
            f"schedule.batches = {self.schedule.batches!r} needs captions of each image in every language, but data.images = "
            "'disjoint' leaves none",
        )

    @property
    def lasting(self) -> Config:
        """The configuration without budget and description: the part that must stay the same when a run is resumed."""
        # The learning rates of a cosine depend on the budget.
        schedule = replace(self.schedule, patience=1)
        if schedule.lr_schedule == "steps":
            schedule = replace(schedule, max_epochs=0, max_steps=0)
        return replace(self, schedule=schedule, description="")


def resolve(source: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of a preset or file.

    Args:
        source: name of a preset, or path of a TOML file, which ends in ``.toml``. A file may say ``extends = "..."`` at its top:
            values that it leaves out then come from that preset, or from that file, whose path starts at its own folder.
        overrides: values by dotted key, as TOML, e.g. ``{"optimizer.learning_rate": "1e-3"}``; a word needs no quotes.

    Raises:
        UsageError: there is no such preset or file, or it is not a configuration.

    Example:
        >>> resolve("kadar2018/bilingual-c2c", {"model.embed_dim": "256"}).model.embed_dim
        256
    """
    return _built(read_table(source), source, overrides)


def from_toml(text: str, source: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a configuration.

    Args:
        text: TOML; with ``extends = "..."`` at its top, values that it leaves out come from that preset, or from that file, whose
            path starts at the current folder.
        source: name of the source, for messages.
        overrides: as in `resolve`.

    Raises:
        UsageError: the text is not a configuration.
    """
    return _built(extended(text, source), source, overrides)


def _built(table: dict[str, Any], source: str, overrides: Mapping[str, str] | None) -> Config:
    try:
        for key, value in (overrides or {}).items():
            override(table, key, value)
        return convert(table, Config)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error


def to_toml(config: Config) -> str:
    """Write a full configuration: every key, in a fixed order. `from_toml` reads it back unchanged."""
    lines, section = [f"description = {dump(config.description)}"], ""
    for key, value in _values(config):
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"[{section}]"]
        lines.append(f"{key.partition('.')[2]} = {value}")
    return "\n".join(lines) + "\n"


def differences(old: Config, new: Config) -> list[str]:
    """Return the keys whose values differ, each as ``loss.margin: was 0.2, now 0.1``."""
    before, after = dict(_values(old)), dict(_values(new))
    keys = dict.fromkeys((*before, *after))  # Another kind of model has other keys.
    return [
        f"{key}: was {before.get(key, 'not there')}, now {after.get(key, 'not there')}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _values(config: Config) -> Iterator[tuple[str, str]]:
    """Yield dotted key and value, as TOML, of everything in the sections; as text, so that the order of languages counts too."""
    for section in fields(config):
        values = getattr(config, section.name)
        if isinstance(values, ModelConfig):
            yield f"{section.name}.kind", dump(values.kind)
        if is_dataclass(values):
            yield from ((f"{section.name}.{key.name}", dump(getattr(values, key.name))) for key in fields(values))


def settings_of(text: str) -> dict[str, Any]:
    """Return the plain values that `to_toml` has written, by dotted key, in their order; without the description."""
    table = parse_toml(text)
    table.pop("description", None)
    settings: dict[str, Any] = {}
    for section, values in table.items():
        settings |= (
            {f"{section}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {section: values}
        )
    return settings
