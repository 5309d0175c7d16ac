"""`swift rollout` on a CPU for tests: python serve.py <arguments of swift rollout>. Child processes import this file too, and get the same."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
os.environ.update(VLLM_CPU_KVCACHE_SPACE='1', VLLM_ENABLE_V1_MULTIPROCESSING='0', VLLM_PLUGINS='swift_megatron_grpo_cpu', HF_HUB_OFFLINE='1',
                  USE_HF='1', MODELSCOPE_OFFLINE='1')

import swift.arguments.deploy_args  # noqa: F401

from swift_megatron_grpo.cpu import vllm_plugin

vllm_plugin.register()

if __name__ == '__main__':
    from swift.pipelines.infer.rollout import rollout_main
    rollout_main(sys.argv[1:])
