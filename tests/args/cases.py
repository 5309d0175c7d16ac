"""Scripts and schedules that the tests ask both worlds about."""

# (name, arguments of `swift rlhf`, processes, prompts in the data)
SCRIPTS = [
    ('defaults', '--num_generations 2', 2, 10),
    (
        'per-device 2, accumulation 4, warm-up, cosine, clipped, three steps',
        '--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --learning_rate 1e-6 --warmup_ratio 0.1 '
        '--lr_scheduler_type cosine '
        '--max_grad_norm 0.5 --max_steps 3 --num_generations 8',
        1,
        40,
    ),
    ('full tuner, its own rate', '--tuner_type full --per_device_train_batch_size 4 --num_generations 4 --num_train_epochs 1', 2, 50),
    ('a fraction of an epoch', '--per_device_train_batch_size 8 --num_generations 8 --num_train_epochs 0.3', 1, 37),
    (
        'two optimizer steps a generation',
        '--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 4 --num_generations 4 --num_train_epochs 2',
        4,
        100,
    ),
    (
        'generation size in completions',
        '--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --generation_batch_size 32 --num_generations 8 --warmup_steps 5',
        2,
        64,
    ),
    ('each generation used twice', '--per_device_train_batch_size 4 --num_iterations 2 --num_generations 4 --num_train_epochs 1.5', 1, 21),
    (
        'a smallest rate',
        '--per_device_train_batch_size 8 --num_generations 4 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr":1e-7} '
        '--learning_rate 2e-6 --max_steps 50',
        1,
        400,
    ),
    (
        'warm-up, plateau, decay',
        '--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 16 --lr_scheduler_type warmup_stable_decay '
        '--lr_scheduler_kwargs {"num_decay_steps":4} --warmup_ratio 0.2 --num_train_epochs 1 --beta 0',
        2,
        33,
    ),
    (
        'constant, weight decay, no clipping',
        '--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --num_generations 4 --lr_scheduler_type constant '
        '--weight_decay 0.01 '
        '--max_grad_norm 0 --tuner_type full --learning_rate 5e-7 --num_train_epochs 2',
        1,
        12,
    ),
    (
        'sequence parallel: two processes share a micro-batch',
        '--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --sequence_parallel_size 2 --steps_per_generation 4 '
        '--num_generations 4 --num_train_epochs 1 --warmup_ratio 0.25',
        4,
        65,
    ),
]

# (type, lr, warmup_steps, warmup_ratio, total steps, kwargs)
SCHEDULES = [
    (kind, 1e-4, steps, ratio, total, kwargs)
    for total in (1, 7, 250)
    for steps, ratio in ((0, 0.0), (3, 0.0), (0, 0.1), (0.05, 0.0))
    for kind, kwargs in (
        ('constant', {}),
        ('constant_with_warmup', {}),
        ('linear', {}),
        ('cosine', {}),
        ('cosine', {'num_cycles': 2.0}),
        ('cosine_with_min_lr', {'min_lr': 1e-6}),
        ('cosine_with_min_lr', {'min_lr_rate': 0.1}),
        ('cosine_warmup_with_min_lr', {'min_lr_rate': 0.1}),
        ('cosine_warmup_with_min_lr', {'min_lr': 1e-6, 'warmup_lr_rate': 0.2}),
        ('cosine_with_restarts', {}),
        ('cosine_with_restarts', {'num_cycles': 3}),
        ('polynomial', {}),
        ('polynomial', {'power': 2.0, 'lr_end': 1e-6}),
        ('inverse_sqrt', {}),
        ('inverse_sqrt', {'timescale': 50}),
        ('warmup_stable_decay', {'num_decay_steps': 2}),
        ('warmup_stable_decay', {'num_decay_steps': 3, 'min_lr_ratio': 0.1, 'decay_type': 'linear'}),
        ('warmup_stable_decay', {'num_decay_steps': 2, 'decay_type': '1-sqrt', 'warmup_type': 'cosine'}),
        ('warmup_stable_decay', {'num_decay_steps': 2, 'num_stable_steps': 1}),
        (
            'warmup_stable_decay',
            {'num_decay_steps': 3, 'num_stable_steps': 2, 'min_lr_ratio': 0.2, 'num_cycles': 1.5, 'warmup_type': '1-sqrt'},
        ),
        ('cosine_with_min_lr', {'min_lr': 2e-5, 'num_cycles': 1.5}),
        ('cosine_warmup_with_min_lr', {'min_lr': 2e-5, 'num_cycles': 1.5}),
        ('polynomial', {'lr_end': 1e-5}),
    )
]
