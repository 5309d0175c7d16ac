"""What is on the device at any moment (an engine double that counts what is resident; the CPU's own sleep mode frees nothing)."""
import pytest

from swift_megatron_grpo.errors import RunError
from swift_megatron_grpo.residency import Part, Residency, Stage

POLICY, GRADIENTS, REFERENCE, OPTIMIZER = Part.POLICY, Part.GRADIENTS, Part.REFERENCE, Part.OPTIMIZER
WEIGHTS, CACHE = Part.ENGINE_WEIGHTS, Part.ENGINE_CACHE


class Device:
    """Counts: every change of what is resident is one row of `history`."""

    def __init__(self) -> None:
        self.resident = {POLICY, GRADIENTS, REFERENCE, OPTIMIZER}
        self.history = [frozenset(self.resident)]

    def change(self, away: set = frozenset(), in_: set = frozenset()) -> None:
        self.resident = (self.resident - set(away)) | set(in_)
        self.history.append(frozenset(self.resident))


class Movers:

    def __init__(self, device: Device) -> None:
        self.device = device

    def release(self, parts) -> None:
        self.device.change(away=parts)

    def take(self, parts) -> None:
        self.device.change(in_=parts)


class Engine:
    """Zeroes its weights on deep sleep, keeps a prefix cache until it is told to empty it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        device.change(in_={WEIGHTS, CACHE})
        self.weights: list[float] | None = None
        self.prefix_cache: dict[str, list[float]] = {}
        self.version = -1

    def load_weights(self, buckets, version: int) -> int:
        assert WEIGHTS in self.device.resident, 'weights were loaded into an engine that sleeps'
        self.version = -1
        self.weights = [tensor for bucket in buckets for _, tensor in bucket]
        self.prefix_cache.clear()
        self.version = version
        return len(self.weights)

    def generate(self, prompt: str) -> list[float]:
        if self.version < 0 or self.weights is None:
            raise RunError('no complete set of weights')
        assert {WEIGHTS, CACHE} <= self.device.resident
        return self.prefix_cache.setdefault(prompt, list(self.weights))

    def sleep(self, level: int) -> None:
        if not {WEIGHTS, CACHE} <= self.device.resident:  # as vLLM's: one of which a part is asleep counts as asleep
            return
        if level == 2:
            self.weights, self.version = None, -1
        self.device.change(away={WEIGHTS, CACHE})

    def wake(self, tags) -> None:
        self.device.change(in_={{'weights': WEIGHTS, 'kv_cache': CACHE}[tag] for tag in tags})


def machine(sleep_level: int = 0, model: bool = False, optimizer: bool = False, bridge: bool = False):
    device = Device()
    residency = Residency(Movers(device), sleep_level=sleep_level, offload_model=model, offload_optimizer=optimizer, offload_bridge=bridge)
    residency.to(Stage.BUILDING)
    engine = Engine(device)
    residency.attach(engine)
    residency.to(Stage.TRAINING)
    return device, residency, engine


def sync(residency: Residency, engine: Engine, value: float, version: int) -> None:
    if residency.stages_in_host_memory:
        residency.to(Stage.EXPORTING)
        residency.to(Stage.LOADING)
    else:
        residency.to(Stage.STREAMING)
    engine.load_weights([[('w', value)]], version)


def two_generations(device: Device, residency: Residency, engine: Engine) -> list[list[float]]:
    answers = []
    for version in (0, 1):
        sync(residency, engine, float(version + 1), version)
        residency.to(Stage.GENERATING)
        answers.append(engine.generate('a prompt'))
        residency.to(Stage.TRAINING)
    return answers


@pytest.mark.parametrize('level', [1, 2])
def test_policy_and_engine_are_never_resident_together_where_the_flags_say_so(level: int) -> None:
    device, residency, engine = machine(sleep_level=level, model=True, optimizer=True, bridge=True)
    assert two_generations(device, residency, engine) == [[1.0], [2.0]]
    together = [row for row in device.history if POLICY in row and row & {WEIGHTS, CACHE}]
    assert together == []
    assert [row for row in device.history if OPTIMIZER in row and row & {WEIGHTS, CACHE}] == []
    assert device.resident == {POLICY, GRADIENTS, REFERENCE, OPTIMIZER}


def test_without_offload_bridge_only_the_policy_weights_meet_the_engine_weights() -> None:
    device, residency, engine = machine(sleep_level=1, model=True, optimizer=True)
    assert two_generations(device, residency, engine) == [[1.0], [2.0]]
    together = {row for row in device.history if row & {WEIGHTS, CACHE} and row & {POLICY, GRADIENTS, REFERENCE, OPTIMIZER}}
    assert together == {frozenset({POLICY, WEIGHTS})}


def test_each_stage_gives_away_before_it_takes() -> None:
    device, residency, engine = machine(sleep_level=1, model=True, optimizer=True)
    start = len(device.history)
    sync(residency, engine, 1.0, 0)
    residency.to(Stage.GENERATING)
    residency.to(Stage.TRAINING)
    assert device.history[start:] == [
        frozenset({POLICY}),  # gradients, reference and optimizer leave before the engine wakes
        frozenset({POLICY, WEIGHTS}),
        frozenset({WEIGHTS}),
        frozenset({WEIGHTS, CACHE}),
        frozenset(),  # the engine sleeps before the trainer comes back
        frozenset({POLICY, GRADIENTS, REFERENCE, OPTIMIZER}),
    ]


def test_the_engine_is_built_when_the_trainer_is_away() -> None:
    device, _, _ = machine(sleep_level=1, model=True, optimizer=True)
    assert device.history[:4] == [
        frozenset({POLICY, GRADIENTS, REFERENCE, OPTIMIZER}),
        frozenset(),
        frozenset({WEIGHTS, CACHE}),
        frozenset(),
    ]


def test_nothing_moves_where_nothing_is_asked() -> None:
    device, residency, engine = machine()
    before = list(device.history)
    assert two_generations(device, residency, engine) == [[1.0], [2.0]]
    assert device.history == before


def test_offload_optimizer_alone_moves_the_optimizer_alone() -> None:
    device, residency, engine = machine(optimizer=True)
    two_generations(device, residency, engine)
    everything = frozenset({POLICY, GRADIENTS, REFERENCE, OPTIMIZER, WEIGHTS, CACHE})
    assert set(device.history[3:]) == {everything, everything - {OPTIMIZER}}


def test_deep_sleep_refuses_to_generate_before_a_full_sync() -> None:
    device, residency, engine = machine(sleep_level=2)
    sync(residency, engine, 1.0, 0)
    residency.to(Stage.GENERATING)
    assert engine.generate('a prompt') == [1.0]
    residency.to(Stage.TRAINING)
    residency.to(Stage.GENERATING)
    with pytest.raises(RunError):
        engine.generate('a prompt')


def test_light_sleep_keeps_the_weights() -> None:
    device, residency, engine = machine(sleep_level=1)
    sync(residency, engine, 1.0, 0)
    for _ in range(2):
        residency.to(Stage.GENERATING)
        assert engine.generate('a prompt') == [1.0]
        residency.to(Stage.TRAINING)
    assert not device.resident & {WEIGHTS, CACHE}


@pytest.mark.parametrize('bridge', [False, True])
def test_an_engine_that_got_weights_and_is_not_used_gives_its_memory_back(bridge: bool) -> None:
    """A run that is resumed inside a generation: weights are sent at its beginning, and then it trains."""
    device, residency, engine = machine(sleep_level=1, model=True, optimizer=True, bridge=bridge)
    sync(residency, engine, 1.0, 0)
    residency.to(Stage.TRAINING)
    assert device.resident == {POLICY, GRADIENTS, REFERENCE, OPTIMIZER}
    residency.to(Stage.GENERATING)
    assert engine.generate('a prompt') == [1.0]
