"""Patterns of the names that frameworks give the tensors of layers and experts.

Sources: the modules of Hugging Face transformers, torchvision and timm as they name their parameters. What follows a
number in a pattern, `NUMBER` of `_names`, is written ``#`` here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorcas_mlflow.reader._names import NUMBER

_LAYERS = re.compile(
    r"(?P<stack>(?:[^#]*?\.)??(?:[a-z_]+_)?(?:layers?|h|blocks?|resblocks|stages?))\.(?P<layer>#)(?=\.|$)"
)
"""``model.layers.#`` (Llama, Mistral, Mixtral, Qwen, DeepSeek, Gemma), ``transformer.h.#`` (GPT-2, Falcon),
``encoder.layer.#`` (BERT, ViT), ``encoder.block.#`` (T5), ``blocks.#`` (timm, MPT), ``down_blocks.#`` (diffusers)."""
_STAGES = re.compile(r"(?P<stack>(?:[^#]*?\.)??layer)(?P<stage>[0-9]{1,3})\.(?P<layer>#)(?=\.|$)")
"""``layer1.#`` to ``layer4.#``: torchvision's ResNet and its kin. Blocks count through all stages."""
_ANY = re.compile(r"(?P<stack>(?:[^#]*?(?=\.))??)\.?(?P<layer>#)(?=\.|$)")
"""``#.weight``, ``features.#.weight``: `torch.nn.Sequential`, where nothing else is a layer."""
_NO_STACKS = re.compile(r"(?:^|\.)(?:state|param_groups|optimizers?|schedulers?|__[a-z]+__)(?:\.|$)")
"""What has numbers that count something else."""

_EXPERT = re.compile(r"(?:^|\.)(?:[a-z]+_)??experts\.(?P<expert>#)(?=\.|$)")
"""``mlp.experts.#`` (Qwen-MoE, DeepSeek), ``block_sparse_moe.experts.#`` (Mixtral)."""
_FUSED = re.compile(r"(?:^|\.)(?:(?:local_)?experts\.(?!#)|block_sparse_moe\.(?:input|output)_linear\.weight$)")
"""``mlp.experts.gate_up_proj``: one tensor for all experts of a layer, which are its rows (Llama 4, gpt-oss, Granite,
and in newer releases of transformers all)."""
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg)(?:\.(?:layer|linear|classifier|proj))?(?:\.weight)?$")
"""``mlp.gate.weight``: its rows are as many as there are experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The layer, stage and expert that one pattern of names tells."""

    stack: str
    """What the layers belong to, such as ``model.layers``; "" for those of a plain `Sequential`."""
    layer: int
    """Which of the pattern's numbers counts layers."""
    stage: int = 0
    """Stages come one after the other, each with layers of its own."""
    expert: int | None = None
    """Which of the pattern's numbers counts experts; None where the pattern is not of one expert."""
    is_fused: bool = False
    """Whether it is a tensor that holds all experts of a layer, one after the other."""
    is_router: bool = False
    """Whether it is a tensor with a row for each expert."""


def read_pattern(text: str) -> Reading | None:
    """Read a pattern by the names that frameworks give; None if it names no layer that they do."""
    if NUMBER not in text:
        return None
    text = _written(text)
    match = _STAGES.match(text)
    if match is not None:
        return _reading(text, match, stage=int(match["stage"]))
    match = _LAYERS.match(text)
    return None if match is None or _NO_STACKS.search(match["stack"]) else _reading(text, match)


def read_any(text: str) -> Reading | None:
    """Read a pattern in a checkpoint of which no name is known: the first number counts layers."""
    match = _ANY.match(_written(text))
    return None if match is None or _NO_STACKS.search(match["stack"]) else _reading(_written(text), match)


def _written(text: str) -> str:
    # A part of a name that is itself "#" is no number.
    return text.replace("#", "_").replace(NUMBER, "#")


def _reading(text: str, match: re.Match[str], stage: int = 0) -> Reading:
    rest = text[match.end() :]
    n_before = text.count("#", 0, match.end())
    expert = _EXPERT.search(rest)
    return Reading(
        stack=match["stack"],
        layer=n_before - 1,
        stage=stage,
        expert=None if expert is None else n_before + rest.count("#", 0, expert.start("expert")),
        is_fused=expert is None and _FUSED.search(rest) is not None,
        is_router=_ROUTER.search(rest) is not None,
    )


_HOLES = ("{layer}", "{expert}")
_ANYTHING = "[^.]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """A rule for how a model names its layers and experts, for names that the reader does not know.

    ```python
    Naming(layer="net.stage{layer}.", expert="net.stage{layer}.moe.{expert}.")
    Naming(layer="net.stage{layer}.", expert="net.stage{layer}.moe.w[{expert}]")
    ```

    A pattern matches the beginning of a name, up to a dot or the end. ``{layer}`` and ``{expert}`` match numbers, ``*``
    matches anything without a dot. With ``[{expert}]`` at the end, experts are the rows of the tensors of that name.
    """

    layer: str
    expert: str | None = None

    def __post_init__(self) -> None:
        if self.layer.count("{layer}") != 1 or "{expert}" in self.layer:
            raise ValueError(f"a pattern of layers has {{layer}} once and no {{expert}}, unlike {self.layer!r}")
        if self.expert is not None and [self.expert.count(each) for each in ("{layer}", "{expert}")] != [1, 1]:
            raise ValueError(f"a pattern of experts has {{layer}} and {{expert}} once, unlike {self.expert!r}")

    @property
    def _has_fused(self) -> bool:
        """True if experts are rows of a tensor."""
        return self.expert is not None and self.expert.endswith("[{expert}]")

    def _layer_regex(self) -> re.Pattern[str]:
        """Return the pattern that the names of a layer's tensors begin with."""
        return _regex(self.layer)

    def _expert_regex(self) -> re.Pattern[str] | None:
        """Return the pattern that the names of experts' tensors begin with; None if the rule has none."""
        return None if self.expert is None else _regex(self.expert.removesuffix("[{expert}]"))


def _regex(pattern: str) -> re.Pattern[str]:
    written = "".join(
        rf"(?P<{part[1:-1]}>[0-9]{{1,18}})" if part in _HOLES else _ANYTHING if part == "*" else re.escape(part)
        for part in re.split(r"(\{layer\}|\{expert\}|\*)", pattern.removesuffix("."))
    )
    # A number is a whole one: what is anything leaves no digit of it out.
    written = written.replace(_ANYTHING + "(?P", r"(?:[^.]*[^.0-9])?(?P").replace(")" + _ANYTHING, r")(?![0-9])[^.]*")
    return re.compile(written + r"(?=\.|$)")
