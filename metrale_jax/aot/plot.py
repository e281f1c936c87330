# SPDX-License-Identifier: Apache-2.0
"""A plan as a picture: memory by use, and the most tokens a second against the batch."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from metrale_jax.aot.plan import Plan
from metrale_jax.aot.roofline import Work
from metrale_jax.core.errors import ConfigError


def check_can_plot(path: Path) -> None:
    """Nothing; raises `ConfigError` if matplotlib is not installed or does not know the file's kind."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib, which is not installed; run `pip install matplotlib`.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes() if hasattr(FigureCanvasAgg, "get_supported_filetypes") else {}
    if kinds and path.suffix[1:] not in kinds:
        raise ConfigError(f"plot {str(path)!r} has no suffix of a picture; use one of {', '.join(sorted(kinds))}.")


def draw_plan(plan: Plan, decode: Callable[[int], Work], path: Path) -> None:
    """Nothing; `path` holds the picture. `decode` gives the work of a step with so many sequences."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{plan.model} on {plan.num_devices} x {plan.chip.kind}, {plan.ask.context:,} tokens of context")
    memory, speed = figure.subplots(1, 2, width_ratios=(1, 2))
    _draw_memory(plan, memory)
    _draw_speed(plan, decode, speed)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot {str(path)!r} cannot be written ({error.strerror}); name another file.") from None


def _draw_memory(plan: Plan, axes) -> None:
    budget, ask = plan.budget, plan.ask
    uses = {
        "weights": budget.weights,
        "KV blocks": budget.pool(ask.num_sequences, ask.context),
        "workspace": budget.workspace,
    }
    bottom = 0.0
    for name, num_bytes in uses.items():
        axes.bar([0], [num_bytes / 1e9], 0.6, bottom=bottom, label=name)
        bottom += num_bytes / 1e9
    axes.axhline(budget.capacity / 1e9, color="black", linestyle="--", label="for programs")
    axes.set(xlim=(-0.6, 0.6), xticks=[], ylabel="GB a device", title="memory")
    axes.legend(loc="upper right", fontsize="small")


def _draw_speed(plan: Plan, decode: Callable[[int], Work], axes) -> None:
    most = max(1, plan.budget.max_sequences(plan.ask.context))
    sizes = sorted({min(most, 1 << power) for power in range(most.bit_length() + 1)})
    if plan.chip.flops:
        work = [decode(count) for count in sizes]
        axes.plot(sizes, [one.num_tokens / one.seconds(plan.chip) for one in work], marker="o")
    else:
        axes.text(0.5, 0.5, "no data sheet for this machine", transform=axes.transAxes, ha="center")
    axes.axvline(most, color="grey", linestyle=":", label=f"largest batch {most}")
    axes.axvline(plan.ask.num_sequences, color="tab:orange", linestyle=":", label=f"asked {plan.ask.num_sequences}")
    axes.set(xscale="log", xlabel="sequences", ylabel="tokens/s at most", title="decode")
    axes.set_xticks(sizes, [str(count) for count in sizes])
    axes.minorticks_off()
    axes.legend(fontsize="small")
