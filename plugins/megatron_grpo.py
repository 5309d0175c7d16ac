"""The explicit door: `swift rlhf --external_plugins plugins/megatron_grpo.py --rlhf_type grpo --backend megatron ...`.

For those who switch the autoload hook off (SWIFT_MEGATRON_GRPO_AUTOLOAD=0). ms-swift imports this file while it reads its arguments, in
each process that it starts; the process then becomes our worker. The file also registers the trainer `megatron_grpo`.
"""

import sys

from swift.trainers.trainer_factory import TrainerFactory

from swift_megatron_grpo.hooks import command_line, doors, patches

patches.register_trainer(TrainerFactory)

if not doors.is_worker_process() and command_line.asked_backend(sys.argv[1:]) not in ('', 'transformers'):
    doors.become_worker(sys.argv[1:])
