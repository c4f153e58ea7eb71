"""Steps that are recorded, made one graph, compiled, planned and replayed: the bits of eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tools.first_gpu.cases import Case, CaseResult, alike, both, figure, holds, same_bits
from tools.first_gpu.models import TRAININGS, Training, batch, parallelised, whole

EAGER = "eager mode's bits"
ZERO = "dp=2 zero 3"
PASSES = ("as traced", "scheduled", "memory planned", "recomputed", "offloaded",
          "offloaded and memory planned")  # fmt: skip


def cases(device: torch.device) -> list[Case]:
    """Replays first, then graphs, then compilers."""
    return [
        Case("capture, with dropout and backward", _captured),
        Case("static=True, dp=2 zero 3", partial(_static, ZERO)),
        *(Case(f"train_step, {name}", partial(_train_step, name)) for name in PASSES),
        Case("static=True, dp=2 tp=2", partial(_static, "dp=2 tp=2 zero 3, sequence parallel")),
        Case("static=True, pp=2 dp=2", partial(_static, "pp=2 dp=2 zero 2")),
        Case("a CUDA graph around a replay", _cuda_graph, ("cuda",)),
        Case("a CUDA graph around a train_step", _cuda_graph_of_step, ("cuda",)),
        Case("regions compiled, aot_eager", partial(_regions, "aot_eager")),
        Case("regions compiled, inductor", partial(_regions, "inductor"), ("triton gpu",), 90.0),
        Case("torch.compile around a captured module", _compiled_capture),
        Case("a graph's own rates", _rates),
    ]


def _on_ranks(ranks: int, body: Callable[[], dict[str, Any]], expected: str = EAGER) -> CaseResult:
    from vescale_comm import simulate

    found = simulate(ranks)(lambda rank, world_size: body())
    return same_bits({f"rank {r}: {k}": p for r, one in enumerate(found) for k, p in one.items()},
                     expected)  # fmt: skip


def _captured(device: torch.device) -> CaseResult:
    """A recorded forward and its gradients, beside the same model without."""
    import vescale_dtensor as vd

    def body() -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        of = TRAININGS["tp=2"]
        model, twin = parallelised(of, device), parallelised(of, device)
        captured = vd.capture(lambda tokens, targets: model(tokens, targets))
        for step in range(4):
            for name, call, module in (("replay", captured, model), ("eager", twin, twin)):
                module.zero_grad()
                torch.manual_seed(step)
                loss = call(*batch(step, device))
                loss.backward()
                gradients = [whole(one.grad) for one in module.parameters()]
                values = [whole(loss), *gradients, torch.rand(2, device=device)]
                for at, value in enumerate(values):
                    key = f"step {step}, {at}"
                    pairs[key] = value if name == "replay" else (value, pairs[key])
        pairs["programs"] = (1, len(captured.programs))
        return pairs

    return _on_ranks(2, body)


def _static(name: str, device: torch.device) -> CaseResult:
    """A model that is recorded, beside the same in eager mode."""
    from vescale_parallel import captured_units

    from tools.first_gpu.models import step_of, train

    of = TRAININGS[name]
    static = Training(of.sizes, of.words, of.model, True, of.microbatches)
    replays: list[int] = []

    def body() -> dict[str, Any]:
        found = []
        for one in (of, static):
            torch.manual_seed(0)
            model = parallelised(one, device)
            found.append(train(model, step_of(one), device, steps=4))
            units = captured_units(model) if one is static else ()
            replays.extend(unit.replays for unit in units)
        return {key: (value, found[1][key]) for key, value in found[0].items()}

    found = _on_ranks(of.ranks, body)
    return both(found, holds("steps are replayed", sum(replays) > 0, f"{sum(replays)} replays"))


def _train_step(name: str, device: torch.device) -> CaseResult:
    """The whole step of a ZeRO model as a graph, with the optimizer and clipping inside."""

    def body() -> dict[str, Any]:
        eager, first = _with_optimizer(device)
        model, second = _with_optimizer(device)
        step = _joint(model, second, device)
        step = step.running(_passed(name, step.graph_module))
        pairs: dict[str, Any] = {}
        for at in range(3):
            torch.manual_seed(at)
            loss, norm = _eager_step(eager, first, *batch(at, device))
            torch.manual_seed(at)
            made = step(*batch(at, device))
            pairs[f"loss {at}"] = (whole(loss), whole(made[0]).clone())
            pairs[f"norm {at}"] = (whole(norm), whole(made[1]).clone())
        named = zip(eager.named_parameters(), model.parameters(), strict=True)
        return pairs | {key: (whole(one), whole(other)) for (key, one), other in named}

    return _on_ranks(2, body)


def _with_optimizer(
    device: torch.device, foreach: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = parallelised(TRAININGS[ZERO], device)
    parameters = model.parameters()
    return model, torch.optim.AdamW(parameters, 0.02, foreach=foreach, fused=not foreach)


def _joint(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Any:
    from vescale_parallel import graph

    step = graph.train_step(model, lambda x, y: model(x, y), *batch(0, device))
    return step.with_optimizer(optimizer, max_norm=1.0)


def _eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    loss: Tensor = model(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss, norm


def _passed(name: str, module: Any) -> Any:
    """A graph after a pass; what runs is called as the graph is."""
    from vescale_parallel import graph, memory

    if name == "scheduled":
        return graph.schedule(module, cap_bytes=4000, ahead_bytes=4000).graph_module
    if name == "memory planned":
        return memory.plan(module, solver="rules", seconds=0).run
    if name == "recomputed":
        return graph.recompute(module, _part(module)).graph_module
    if name.startswith("offloaded"):
        offloaded = graph.offload(module, _part(module))
        assert offloaded.moved, "nothing waits on the host, so nothing is asked"
        made = offloaded.graph_module
        return made if name == "offloaded" else memory.plan(made, solver="rules", seconds=0).run
    return module


def _part(module: Any) -> int:
    """Less than a graph takes, and more than the least that a pass reaches."""
    from vescale_parallel import memory

    return int(0.85 * memory.plan(module, solver="rules", seconds=0).program_peak)


def _cuda_graph(device: torch.device) -> CaseResult:
    """A recorded step under a CUDA graph: replays draw on, as eager does."""
    import vescale_dtensor as vd
    from vescale_dtensor import Shard
    from vescale_parallel import mesh

    here = mesh(dp=1, device_type="cuda")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
    model = vd.distribute_module(layers.to(device), here)
    captured = vd.capture(lambda x: model(x).square().mean())
    rows = torch.randn(4, 8, device=device)
    x = vd.DTensor.from_local(rows, here, [Shard(0)])
    _warm(lambda: captured(x).backward(), model)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        loss = captured(x)
        loss.backward()
    pairs: dict[str, Any] = {}
    for seed in range(3):
        rows.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        torch.manual_seed(seed)
        recorded.replay()
        kept = [one.grad for one in model.parameters()]
        found = [whole(loss).clone(), *(whole(one).clone() for one in kept)]
        model.zero_grad()
        torch.manual_seed(seed)
        expected = model(x).square().mean()
        expected.backward()
        wanted = [whole(expected), *(whole(one.grad) for one in model.parameters())]
        pairs |= {f"replay {seed}, {at}": p for at, p in enumerate(zip(wanted, found, strict=True))}
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
    torch.distributed.destroy_process_group()
    return alike(pairs, expected="eager mode's numbers, dropout too")


def _warm(call: Callable[[], Any], model: nn.Module) -> None:
    """Three calls on a stream of their own, as torch asks for before a capture."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            call()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()


def _cuda_graph_of_step(device: torch.device) -> CaseResult:
    """A whole step, its optimizer included, replayed as a CUDA graph on one rank."""
    of = TRAININGS[ZERO]
    alone = Training({"dp": 1}, of.words)
    torch.manual_seed(0)
    model = parallelised(alone, device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = _joint(model, optimizer, device)
    tokens, targets = (one.clone() for one in batch(0, device))
    _warm(lambda: step(tokens, targets), model)
    before = {name: whole(one).clone() for name, one in model.named_parameters()}
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        loss = step(tokens, targets)[0]
    recorded.replay()
    torch.cuda.synchronize()
    moved = any(not torch.equal(before[n], whole(p)) for n, p in model.named_parameters())
    finite = bool(whole(loss).isfinite().all())
    torch.distributed.destroy_process_group()
    return holds("replays move the parameters", moved and finite, f"loss {float(whole(loss)):.4f}")


def _regions(backend: str, device: torch.device) -> CaseResult:
    """Regions between collectives, compiled: eager's numbers up to rounding."""
    from vescale_comm import simulate
    from vescale_parallel import graph

    told: list[str] = []

    def body(rank: int, world_size: int) -> dict[str, Any]:
        # Of a fused update torch's functionalization refuses to make a region.
        eager, first = _with_optimizer(device, foreach=True)
        model, second = _with_optimizer(device, foreach=True)
        step = _joint(model, second, device)
        compiled = graph.compile_regions(step.graph_module, backend=backend)
        told.extend(one.why_not for one in compiled.regions if one.why_not)
        step = step.running(compiled.graph_module)
        pairs: dict[str, Any] = {}
        for at in range(2):
            torch.manual_seed(at)
            loss, _ = _eager_step(eager, first, *batch(at, device))
            torch.manual_seed(at)
            pairs[f"loss {at}"] = (whole(loss), whole(step(*batch(at, device))[0]).clone())
        return pairs

    found = simulate(2)(body)
    pairs = {f"rank {r}: {k}": p for r, one in enumerate(found) for k, p in one.items()}
    regions = holds("all regions are compiled", not told, told[0][:100] if told else "all are")
    return both(alike(pairs, expected="within 1e-05 of eager mode"), regions)


def _compiled_capture(device: torch.device) -> CaseResult:
    """`torch.compile` as the transform of a captured module."""
    import vescale_dtensor as vd
    from vescale_comm import simulate

    def body(rank: int, world_size: int) -> dict[str, Any]:
        of = TRAININGS["tp=2"]
        model, twin = parallelised(of, device), parallelised(of, device)
        compiled = vd.capture(
            lambda tokens, targets: model(tokens, targets),
            transform=lambda module: torch.compile(module, backend="aot_eager"),
        )
        pairs: dict[str, Any] = {}
        for step in range(2):
            found = []
            for call, module in ((twin, twin), (compiled, model)):
                module.zero_grad()
                torch.manual_seed(step)
                loss = call(*batch(step, device))
                loss.backward()
                found.append([whole(loss), *(whole(one.grad) for one in module.parameters())])
            pairs |= {f"step {step}, {at}": p for at, p in enumerate(zip(*found, strict=True))}
        return pairs

    found = simulate(2)(body)
    pairs = {f"rank {r}: {k}": p for r, one in enumerate(found) for k, p in one.items()}
    return alike(pairs, expected="within 1e-05 of eager mode")


def _rates(device: torch.device) -> CaseResult:
    """What `graph.calibrate` finds out about the machine."""
    from vescale_comm import simulate
    from vescale_parallel import graph

    (machine,) = simulate(1)(lambda rank, world_size: graph.calibrate())
    return figure(
        f"{machine.flops / 1e12:.2f} Tflop/s, memory {machine.memory_bandwidth / 1e9:.0f} GB/s"
    )
