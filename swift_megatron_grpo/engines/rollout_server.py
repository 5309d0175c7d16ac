"""One `swift rollout` server, through ms-swift's VLLMClient (import tier 2).

The server is ms-swift's, unchanged; it knows nothing of policy versions. Its engine process, however, hosts the key-value store of the group
through which weights are sent. The version is written there after the last weight and read again after each answer: an engine that was
started anew has no such store, so its answers cannot be taken for those of the weights that were sent.
"""
from __future__ import annotations

import atexit
import requests
import threading
import time
import torch
from collections.abc import Callable, Sequence
from dataclasses import asdict
from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import RolloutOutput
from swift.rlhf_trainers.utils import FlattenedTensorBucket, add_base_layer_suffix_by_param_names, expand_vllm_param_name_aliases
from swift.rlhf_trainers.vllm_client import VLLMClient
from typing import Any, TypeVar

from .base import Bucket
from .server_pool import ServerGone

T = TypeVar('T')

VERSION_KEY = 'swift_megatron_grpo/policy_version'
CONNECT_SECONDS = 10.0
HEARTBEAT_SECONDS = 1.0


class _Session(requests.Session):
    """A session whose requests end: ms-swift's client gives no timeout."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def request(self, method: str, url: str, **kwargs: Any) -> requests.Response:  # type: ignore[override]
        kwargs.setdefault('timeout', (CONNECT_SECONDS, self.seconds))
        return super().request(method, url, **kwargs)


def within(seconds: float, what: str, function: Callable[[], T], lost: Callable[[], str | None] = lambda: None) -> T:
    """`function()` in a thread; TimeoutError that names `what` after `seconds`, ServerGone as soon as `lost` says why.

    The thread is left behind then: it waits for someone who is gone.
    """
    box: list[Any] = []
    end = time.monotonic() + seconds

    def work() -> None:
        try:
            box.append((function(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not box:
        thread.join(max(min(end - time.monotonic(), 0.2), 0.0))
        if box:
            break
        if why := lost():
            raise ServerGone(why)
        if time.monotonic() >= end:
            raise TimeoutError(f'{what} did not end within {seconds:g} s')
    value, error = box[0]
    if error is not None:
        raise error
    return value


class SwiftRolloutServer:
    """Args:
        url: http://host:port.
        group_port: on which the server's engine opens the group for weights.
        device: the rank's device, from which weights are sent.
        connect_timeout: seconds that it may take to appear (--vllm_server_timeout).
        server_timeout: seconds that its engine may stay silent before it counts as gone.
        sync_timeout: deadline of one step of a weight sync.
    """

    def __init__(self, url: str, group_port: int, device: torch.device, *, connect_timeout: float, server_timeout: float,
                 sync_timeout: float):
        self.connect_timeout = connect_timeout
        self.name = url.rstrip('/')
        self.group_port = group_port
        self.device = device
        self.server_timeout = server_timeout
        self.sync_timeout = sync_timeout
        self.client: VLLMClient | None = None
        self.kind: dict[str, Any] = {}
        self.world_size = 1
        self.parameter_names: set[str] = set()
        self.needs_base = True
        self._seen = 0.0
        self._gone: str | None = None
        self._stop_heartbeat = threading.Event()

    # -- connection --------------------------------------------------------------------------------------------------------------------------

    def is_back(self) -> bool:
        try:
            return requests.get(f'{self.name}/health/', timeout=2.0).status_code == 200
        except requests.RequestException:
            return False

    def connect(self) -> None:
        """Waits for the server, at most connect_timeout, and opens the group for weights. TimeoutError names what did not come."""
        self.disconnect(say_goodbye=False)
        started = time.monotonic()
        while not self.is_back():
            if time.monotonic() - started > self.connect_timeout:
                raise TimeoutError(f'it did not answer within {self.connect_timeout:g} s (--vllm_server_timeout). It is started with '
                                   '`swift rollout`')
            time.sleep(min(1.0, self.connect_timeout / 10))
        client = VLLMClient(base_urls=[self.name], group_ports=[self.group_port], connection_timeout=self.connect_timeout)
        client.sessions = [_Session(self.sync_timeout)]
        self.kind = client.get_engine_type()
        self.world_size = client.sessions[0].get(f'{self.name}/get_world_size/').json()['world_size']

        def open_group() -> None:
            client.close_communicator()  # of a run before this one
            client.init_communicator(device=self.device)

        within(self.sync_timeout, f'the group for weights on port {self.group_port} (--vllm_server_group_port)', open_group)
        atexit.unregister(client.close_communicator)
        if self.kind.get('enable_lora'):
            self.parameter_names = expand_vllm_param_name_aliases(set(client.get_model_state_keys()))
        self.client = client
        self.needs_base = True
        self._gone = None
        self._set_version(-1)
        self._stop_heartbeat = threading.Event()
        threading.Thread(target=self._heartbeat, args=(client, self._stop_heartbeat), daemon=True).start()

    def disconnect(self, *, say_goodbye: bool) -> None:
        self._stop_heartbeat.set()
        client, self.client = self.client, None
        if client is not None and say_goodbye:
            client.sessions = [_Session(5.0)]
            client.close_communicator()

    def _heartbeat(self, client: VLLMClient, stop: threading.Event) -> None:
        self._seen = time.monotonic()
        while not stop.wait(HEARTBEAT_SECONDS):
            try:
                client.pynccl_comms[0].group.store.get(VERSION_KEY)
            except Exception as error:
                if not stop.is_set():
                    self._gone = f'its engine ended ({_first_line(error)})'
                return
            self._seen = time.monotonic()

    # -- weights -----------------------------------------------------------------------------------------------------------------------------

    def send(self, bucket: Bucket) -> None:
        """One bucket of weights, already on its way out of the policy (see `flatten`)."""
        self.send_flat(*flatten(self.load_names(bucket)))

    def load_names(self, bucket: Bucket) -> Bucket:
        return list(add_base_layer_suffix_by_param_names(iter(bucket), self.parameter_names)) if self.parameter_names else bucket

    def send_flat(self, metadata: list[Any], flat: torch.Tensor) -> None:
        self._within('a bucket of weights', lambda client: client.update_flattened_params(metadata, flat))

    def finish(self, version: int) -> None:
        """All weights were sent: the engine's own post-processing, empty caches, and the version."""

        def process(client: VLLMClient) -> None:
            client.process_weights_after_loading()
            client.reset_prefix_cache()
            client.reset_mm_cache()
            client.reset_encoder_cache()

        self._within('the end of a weight sync', process)
        self._set_version(version)
        self.needs_base = False

    def send_adapter(self, config: dict[str, Any], metadata: list[Any], flat: torch.Tensor, version: int) -> None:

        def send(client: VLLMClient) -> None:
            client.update_adapter_flattened_param(config, metadata, flat)
            client.reset_prefix_cache()  # answered after the adapter was taken: the engine works in order

        self._within('the adapter', send)
        self._set_version(version)

    def invalidate(self) -> None:
        """From here to `finish` the weights are not a complete set."""
        self._set_version(-1)

    def _within(self, what: str, action: Callable[[VLLMClient], None]) -> None:
        client = self.client
        if client is None or self._gone:
            raise ServerGone(self._gone or 'it is not connected')
        within(self.sync_timeout, f'{what} (--sync_timeout)', lambda: action(client), lost=lambda: self._gone)

    def _set_version(self, version: int) -> None:
        client = self.client
        if client is None or self._gone:
            raise ServerGone(self._gone or 'it is not connected')
        within(self.server_timeout, 'the version (--server_timeout)', lambda: client.pynccl_comms[0].group.store.set(VERSION_KEY, str(version)))

    def version(self) -> int:
        """As the engine's process has it. ServerGone where that process is not the one that got the weights."""
        client = self.client
        if client is None or self._gone:
            raise ServerGone(self._gone or 'it is not connected')
        try:
            return int(within(self.server_timeout, 'the version', lambda: client.pynccl_comms[0].group.store.get(VERSION_KEY)))
        except Exception as error:
            raise ServerGone(f'its engine ended ({_first_line(error)})') from error

    # -- answers -----------------------------------------------------------------------------------------------------------------------------

    def answer(self, batch: Sequence[Any], config: RequestConfig, version: int, seconds: float) -> list[RolloutOutput]:
        """See server_pool.RolloutServer. While the server samples, its engine's heartbeat says that it lives."""
        held = self.version()
        if held != version:
            raise ServerGone(f'it holds weights of version {held}, not {version}')
        answered: list[Any] = []

        def post() -> None:
            try:
                answered.append(requests.post(f'{self.name}/infer/', timeout=(CONNECT_SECONDS, seconds), json={
                    'infer_requests': [asdict(request) for request in batch], 'request_config': asdict(config), 'use_tqdm': False}))
            except BaseException as error:
                answered.append(error)

        self._seen = time.monotonic()
        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if self._gone:
                raise ServerGone(self._gone)
            if time.monotonic() - self._seen > self.server_timeout:
                raise ServerGone(f'its engine was silent for {self.server_timeout:g} s (--server_timeout)')
        response = answered[0]
        if isinstance(response, requests.Timeout):
            raise ServerGone(f'no answer within {seconds:.0f} s')
        if isinstance(response, BaseException):
            self.version()  # ServerGone, if that is why
            raise response
        if response.status_code != 200:
            raise RuntimeError(f'status {response.status_code}: {response.text[:300]}')
        outputs = [RolloutOutput.model_validate(item) for item in response.json()]
        held = self.version()
        if held != version:
            raise ServerGone(f'its answer was sampled while its weights changed to version {held}')
        return outputs


def flatten(bucket: Bucket) -> tuple[list[Any], torch.Tensor]:
    """(metadata, one uint8 tensor): a copy, so that the next bucket may be gathered while this one is sent."""
    flat = FlattenedTensorBucket(named_tensors=[(name, tensor.contiguous()) for name, tensor in bucket])
    return flat.get_metadata(), flat.get_flattened_tensor()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f'{type(error).__name__}: {text.splitlines()[0][:160]}' if text else type(error).__name__
