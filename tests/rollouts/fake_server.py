"""A rollout server without an engine: the endpoints of `swift rollout`, its group for weights and its order of work, in threads of one process.

It keeps the weights that it gets and answers each request with the number of tensors it holds, or (`random_answers`) with tokens that follow
from the seed. `end()` is a process that is gone: its port and its store close. `python fake_server.py PORT` is a server in a process of its own,
which prints its events.
"""
import json
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class FakeServer:

    def __init__(self, port: int) -> None:
        self.port = port
        self.weights: dict[str, torch.Tensor] = {}
        self.resets: list[str] = []
        self.answer_after = 0.0
        self.statuses: list[int] = []  # of the next answers
        self.random_answers = False
        self.ends_at_batch = -1
        self.batches = 0
        self.group: Any = None
        self.communicator: Any = None
        self.transfers = 0
        self.events: list[dict[str, Any]] = []  # what was asked, in order, with the version that the trainer wrote into the store
        self.sampling = 0  # requests that are being answered now
        self.speaks = False
        self.on_end: Callable[[], None] = lambda: None
        self.work: queue.Queue[Any] = queue.Queue()
        fake = self

        class Handler(BaseHTTPRequestHandler):

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                answers = {'health': {'status': 'ok'}, 'get_world_size': {'world_size': 1}, 'get_model_state_keys': {'keys': []}}
                self.reply(answers[self.path.strip('/')])

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get('content-length') or 0))
                name = self.path.strip('/')
                status, value = fake.call(name, json.loads(body) if body else {})
                self.reply(value, status)

            def reply(self, value: Any, status: int = 200) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header('content-length', str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(('127.0.0.1', port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True).start()
        threading.Thread(target=self._worker, daemon=True).start()

    def end(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.work.put(None)
        self.group = self.communicator = None

    def vanish(self) -> None:
        self.end()
        self.on_end()

    def note(self, what: str, **more: Any) -> None:
        from swift_megatron_grpo.engines.rollout_server import VERSION_KEY
        group = self.group
        version = int(group.store.get(VERSION_KEY)) if group is not None else None
        self.events.append({'what': what, 'version': version, 'at': time.monotonic(), **more})
        if self.speaks:
            print(json.dumps(self.events[-1]), flush=True)

    def call(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        if name == 'get_engine_type':
            return 200, {'engine_type': 'LLMEngine', 'enable_multi_turn': False, 'use_gym_env': False, 'enable_lora': False}
        if name in ('init_communicator', 'close_communicator', 'update_flattened_params'):
            self.work.put((name, body))
        elif name == 'process_weights_after_loading':
            self.wait()
        elif name.startswith('reset_'):
            self.resets.append(name)
        elif name == 'infer':
            seed = body['request_config']['seed']
            self.note('infer', seed=seed, count=len(body['infer_requests']))
            self.sampling += 1
            time.sleep(self.answer_after)
            self.sampling -= 1
            self.note('answered', seed=seed)
            if self.statuses and (status := self.statuses.pop(0)) != 200:
                return status, {'detail': 'no'}
            self.batches += 1
            if self.batches == self.ends_at_batch:
                threading.Thread(target=self.vanish, daemon=True).start()
                time.sleep(5)  # no answer comes
                return 500, {}
            if self.random_answers:
                return 200, [self.random_output(body['request_config']['seed'] + i) for i, _ in enumerate(body['infer_requests'])]
            return 200, [self.output(str(len(self.weights)), [1]) for _ in body['infer_requests']]
        return 200, {}

    def wait(self) -> None:
        done = threading.Event()
        self.work.put(('wait', done))
        done.wait(20)

    def random_output(self, seed: int) -> dict[str, Any]:
        rng = random.Random(seed)
        tokens = [rng.randrange(3, 300) for _ in range(1 + rng.randrange(8))]
        return self.output(' '.join(str(token) for token in tokens), tokens)

    @staticmethod
    def output(text: str, tokens: list[int]) -> dict[str, Any]:
        return {'response': {'model': '', 'choices': [{'index': 0, 'message': {'role': 'assistant', 'content': text}, 'finish_reason': 'stop',
                                                       'logprobs': None, 'token_ids': tokens}],
                             'usage': {'prompt_tokens': 1, 'completion_tokens': 1, 'total_tokens': 2}}}

    def _worker(self) -> None:
        while (item := self.work.get()) is not None:
            name, body = item
            try:
                if name == 'wait':
                    body.set()
                else:
                    getattr(self, name)(body)
            except Exception as error:  # the real server logs it and goes on
                print('fake server:', name, error, flush=True)

    def close_communicator(self, body: dict[str, Any]) -> None:
        self.group = self.communicator = None

    def init_communicator(self, body: dict[str, Any]) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        from swift_megatron_grpo.cpu.vllm_plugin import GlooCommunicator
        self.group = StatelessProcessGroup.create(host='127.0.0.1', port=body['port'], rank=0, world_size=2)
        self.communicator = GlooCommunicator(self.group)

    def update_flattened_params(self, body: dict[str, Any]) -> None:
        metadata = body['metadatas']
        flat = torch.empty(metadata[-1]['end_idx'], dtype=torch.uint8)
        self.communicator.broadcast(flat, src=1)
        self.group.barrier()
        self.note('bucket', sampling=self.sampling)
        self.transfers += 1
        for item in metadata:
            dtype = getattr(torch, item['dtype'].split('.')[-1])
            self.weights[item['name']] = flat[item['start_idx']:item['end_idx']].view(dtype).reshape(item['shape'])


if __name__ == '__main__':
    server = FakeServer(int(sys.argv[1]))
    server.random_answers = server.speaks = True
    server.answer_after = float(sys.argv[2])
    print('ready', flush=True)
    threading.Event().wait()
