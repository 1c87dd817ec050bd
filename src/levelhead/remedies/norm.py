"""QK-norm: queries and keys of every head divided by their root mean square, times learned gains.

Applied after the projections, before rotations, as in models that ship with it; a module with identities called q_norm
and k_norm gets the norms there, and torch's own module at its call. It bounds a logit by √D times the gains, whatever
the weights are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from levelhead.errors import bad_value
from levelhead.remedies import gains, shards
from levelhead.remedies.probe import Probe
from levelhead.remedies.projections import Source, Sources, Unknown
from levelhead.remedies.remedy import Remedy, Sight, checked, depth, listed, no_attention, positive, run
from levelhead.torch.multihead_forward import FAST_PATH_OFF
from levelhead.watching import amend, effective_scale
from levelhead.watching.intercept import INTERCEPTION
from levelhead.watching.watch import Watch
from levelhead.watching.watchable import unwrapped

_TOLERANCE = 0.02  # of a row's root mean square, which ε and half precision take a little from
_NAMES = ("q_norm", "k_norm")


class Normed:
    """A forward hook of a projection: heads in, normalised heads out, the rest untouched."""

    def __init__(self) -> None:
        self.parts: list[tuple[nn.Module, Tensor]] = []  # norms and their (heads, D) columns

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        for norm, columns in self.parts:
            in_parts = shards.is_sharded(output) and not shards.is_sharded(norm.weight)
            if in_parts or output.shape[-1] < columns.numel():
                raise gains.beside_parts("q_norm and k_norm")
            if in_order(columns, output.shape[-1]):  # the whole of it: nothing to pick out
                heads = output.reshape(*output.shape[:-1], *columns.shape)
                output = norm(heads).flatten(-2)
                continue
            columns = columns.to(output.device)
            normed = norm(output[..., columns]).flatten(-2).to(output.dtype)
            output = output.index_copy(-1, columns.flatten(), normed)
        return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def in_order(columns: Tensor, features: int) -> bool:
    """Whether these are all the columns, one after the other."""
    return columns.numel() == features and torch.equal(columns.flatten(), torch.arange(features))


class qk_norm(Remedy):  # noqa: N801  a verb, as `patch` is
    """Normalises queries and keys per head, with learned gains, until `undo()`.

    Call it before the optimiser is made, and before the model is distributed: every attention module gets children
    `q_norm` and `k_norm` (`nn.RMSNorm` of a head's width), whose weights are parameters like any other.

    Args:
        model: any model whose attention `watch` sees.
        batch: what to call it with once, to find out which outputs of which projection are heads.
        gain: what the gains begin with.
        eps: added to the mean square.
        optimizer: one that trains the model already; the gains join it, with the options of the projections and no
            weight decay. Without it, an optimiser's first step that trains the projections and not the gains raises.

    Raises:
        LevelheadValueError: nothing attends, a module is normalised already, or its layout is not known; every such
            module is named, and nothing is changed.

    Example:
        >>> import torch, levelhead as lh
        >>> model = lh.torch.MultiHeadAttention(16, 2)
        >>> batch = torch.randn(1, 5, 16)
        >>> remedy = lh.remedies.qk_norm(model, batch)
        >>> remedy
        qk_norm of MultiHeadAttention: 1 modules
        >>> "q_norm.weight" in model.state_dict()
        True
        >>> print(remedy.verify(batch))
        qk_norm: in force in 1 modules
          (the model): rms of q 1 to 1, of k 1 to 1
    """

    _name = "qk_norm"
    _advice = "The norms are not called, or something after them changes q and k"

    def __init__(
        self, model: nn.Module, batch: Any, *, gain: float = 1.0, eps: float = 1e-6, optimizer: Any = None
    ) -> None:
        self._gain = positive("gain", gain, "1.0 is the usual")
        self._eps = positive("eps", eps, "1e-6 is the usual")
        gains.refuse_unless_reduced(checked(model))
        probed = _probed(model, batch)
        super().__init__(model, {name: module for name, (module, _) in probed.items()})
        self._ratios: dict[str, tuple[float, float]] = {}
        self._taken: list[tuple[nn.Module, str, nn.Module | None]] = []
        self._hooks: list[Any] = []
        self._amended: list[nn.Module] = []
        hooks: dict[nn.Module, Normed] = {}
        for name, (module, sources) in probed.items():
            self._install(name, module, sources, hooks)
        for projection, hook in hooks.items():
            self._hooks.append(projection.register_forward_hook(hook))
        self._trained = gains.Trained(self.modules, {name: sources for name, (_, sources) in probed.items()})
        if optimizer is not None:
            try:
                self._trained.join(optimizer)
            except BaseException:
                self.undo()
                raise

    def _install(self, name: str, module: nn.Module, sources: Sources, hooks: dict[nn.Module, Normed]) -> None:
        own = all(isinstance(module._modules.get(each), nn.Identity) for each in _NAMES)
        norms = []
        for each, source in zip(_NAMES, (sources.q, sources.k), strict=True):
            assert isinstance(source, Source)
            weight = getattr(source.module, source.weight)
            norm = nn.RMSNorm(sources.d_k, self._eps, device=weight.device, dtype=weight.dtype)
            nn.init.constant_(norm.weight, self._gain)
            self._taken.append((module, each, module._modules.get(each)))
            module._modules[each] = norm.train(module.training)
            norms.append(norm)
            if not own and not isinstance(module, nn.MultiheadAttention):
                distinct = torch.unique(source.columns, dim=0)
                hooks.setdefault(source.module, Normed()).parts.append((norm, distinct))
        assert isinstance(sources.q, Source) and isinstance(sources.k, Source)
        self._ratios[name] = (sources.q.ratio, sources.k.ratio)
        if isinstance(module, nn.MultiheadAttention):
            INTERCEPTION.hold()
            FAST_PATH_OFF.hold()  # it passes by what a remedy changes
            amend.amend(module, q_norm=norms[0], k_norm=norms[1])
            self._amended.append(module)

    def _undo(self) -> None:
        self._trained.close()
        for hook in self._hooks:
            hook.remove()
        for module in self._amended:
            amend.restore(module, "q_norm", "k_norm")
            INTERCEPTION.release()
            FAST_PATH_OFF.release()
        for module, name, before in self._taken:
            if before is None:
                del module._modules[name]
            else:
                module._modules[name] = before

    # ---- the proof

    def _wrong(self, name: str, sight: Sight) -> str | None:
        assert sight.record is not None
        if idle := sight.record.facts.norms_idle:
            return f"{' and '.join(idle)} never ran"
        for each, ratio, (least, most) in zip(_NAMES, self._ratios[name], _extremes(sight), strict=True):
            norm: Any = self.modules[name]._modules[each]
            sizes = norm.weight.detach().abs()
            low, high = ratio * float(sizes.min()), ratio * float(sizes.max())
            if not (least >= low * (1 - _TOLERANCE) and most <= high * (1 + _TOLERANCE)):
                return (
                    f"rows of {each[0]} reach the softmax with a root mean square of"
                    f" {least:.4g} to {most:.4g}, where gains allow {low:.4g} to {high:.4g}"
                )
        return None

    def _evidence(self, name: str, sight: Sight) -> str:
        (a, b), (c, d) = _extremes(sight)
        return f"rms of q {a:.3g} to {b:.3g}, of k {c:.3g} to {d:.3g}"


def _extremes(sight: Sight) -> tuple[tuple[float, float], tuple[float, float]]:
    """The least and the greatest root mean square of a row, of q and of k."""

    def of(rows: list[Tensor]) -> tuple[float, float]:
        flat = torch.cat([x.double().square().mean(-1).flatten() for x in rows]).sqrt()
        return float(flat.min()), float(flat.max())

    return of([q for _, _, q, _ in sight.calls]), of([k for _, _, _, k in sight.calls])


# ---- which modules


def _probed(model: nn.Module, batch: Any) -> dict[str, tuple[nn.Module, Sources]]:
    """The attention modules and where their heads come from, or an error that names the rest."""
    inner = unwrapped(model)
    with Watch(inner, deep=depth(inner), rows=None) as watch:
        probe = Probe(watch)
        try:
            run(inner, batch)
        finally:
            probe.close()
        unseen = [line for line in watch.coverage() if not line.seen]
    if not probe.found and not unseen:
        raise no_attention(model)
    wrong = {line.module: line.how for line in unseen}
    found: dict[str, tuple[nn.Module, Sources]] = {}
    for layer, sources in probe.found.items():
        name, module = probe.modules[layer].name, probe.modules[layer].module
        if why := _refused(module, sources):
            wrong[name] = why
        elif name in found and not found[name][1].same_rows(sources):
            wrong[name] = "attends several times, from other rows each time, and a norm of one is none of the other"
        found.setdefault(name, (module, sources))
    if wrong:
        wanted = "attention whose queries and keys come straight from projections"
        raise bad_value("model", wanted, f"{len(wrong)} that are not:\n{listed(wrong)}\n", "Nothing was changed")
    return found


def _refused(module: nn.Module, sources: Sources) -> str | None:
    for each in _NAMES:
        there = getattr(module, each, None)
        if there is not None and not isinstance(there, nn.Identity):
            return f"has a {each} already"
    if norms := effective_scale.qk_norms(module):
        return f"is normalised already ({', '.join(norms)})"
    for each, source in (("q", sources.q), ("k", sources.k)):
        if isinstance(source, Unknown):
            return f"{each}: {source.why}"
    return None
