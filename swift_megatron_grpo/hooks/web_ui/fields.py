"""What the section shows: one row a control, with its words in both languages (import tier 0: standard library only)."""

from __future__ import annotations

import dataclasses

PREFIX = 'megatron_'
"""Element names on the page begin with it: ms-swift's own elements, and its argument names, stay as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """One control of the section. `argument` is the argument that it sets, '' for one that sets none.

    `mirrors` names the element of ms-swift's own page that holds the same setting; the two show the same value, and ms-swift's counts.
    """

    name: str
    argument: str = ''
    kind: str = 'text'  # text, choice, check
    choices: tuple[str, ...] = ()
    free: bool = False  # a choice that also takes typed values
    value: str | bool = ''
    mirrors: str = ''
    en: tuple[str, str]  # label, explanation
    zh: tuple[str, str]

    @property
    def element(self) -> str:
        return PREFIX + self.name


BACKEND = Control(
    name='backend',
    argument='backend',
    kind='choice',
    choices=('transformers', 'megatron'),
    value='transformers',
    en=('Training backend', "transformers: ms-swift's own trainer; megatron: Megatron-Core, with the settings below"),
    zh=('训练后端', 'transformers：ms-swift 自带的训练器；megatron：使用 Megatron-Core 与下方的设置'),
)
NUM_PROCESSES = Control(
    name='num_processes',
    en=('Processes (NPROC_PER_NODE)', 'Empty: one for each GPU chosen above, or the number beside "Use DDP"'),
    zh=('进程数(NPROC_PER_NODE)', '留空：上方所选的每张 GPU 一个进程，或"使用DDP"旁的数量'),
)


def _size(name: str, argument: str, en: tuple[str, str], zh: tuple[str, str]) -> Control:
    return Control(name=name, argument=argument, en=en, zh=zh)


PARALLEL = (
    _size('tp', 'tensor_model_parallel_size', ('Tensor parallel', 'TP; empty: 1'), ('张量并行', 'TP；留空为 1')),
    _size('pp', 'pipeline_model_parallel_size', ('Pipeline parallel', 'PP; empty: 1'), ('流水线并行', 'PP；留空为 1')),
    _size(
        'vpp',
        'virtual_pipeline_model_parallel_size',
        ('Virtual stages', 'VPP, stages in one PP rank; empty: none'),
        ('虚拟流水线', 'VPP，每个 PP rank 的阶段数；留空不使用'),
    ),
    _size('cp', 'context_parallel_size', ('Context parallel', 'CP; empty: 1'), ('上下文并行', 'CP；留空为 1')),
    _size('ep', 'expert_model_parallel_size', ('Expert parallel', 'EP, MoE models; empty: 1'), ('专家并行', 'EP，用于 MoE 模型；留空为 1')),
    _size('etp', 'expert_tensor_parallel_size', ('Expert tensor parallel', 'ETP; empty: 1'), ('专家张量并行', 'ETP；留空为 1')),
    Control(
        name='sequence_parallel',
        argument='sequence_parallel',
        kind='check',
        value=False,
        en=('Sequence parallel', 'Splits activations over the TP ranks'),
        zh=('序列并行', '把激活值切分到各个 TP rank'),
    ),
)
BATCH = (
    _size(
        'micro_batch_size',
        'micro_batch_size',
        ('Micro batch size', 'Completions; empty: the train batch size of the hyper settings'),
        ('micro batch 大小', '以 completion 计；留空则用超参数中的训练 batch size'),
    ),
    _size(
        'global_batch_size',
        'global_batch_size',
        ('Global batch size', 'Completions an optimizer step; empty: micro batch x DP x gradient accumulation'),
        ('global batch 大小', '每个优化器步的 completion 数；留空则为 micro batch x DP x 梯度累计'),
    ),
    _size(
        'steps_per_generation',
        'steps_per_generation',
        ('Steps per generation', 'In the unit that the plan prints; empty: one optimizer step'),
        ('每次生成的步数', '单位见计划；留空为一个优化器步'),
    ),
    _size(
        'max_tokens_per_micro_batch',
        'max_tokens_per_micro_batch',
        ('Token budget', 'Tokens of a packed micro-batch; empty: by number of completions'),
        ('token 预算', '一个打包的 micro-batch 的 token 数；留空则按 completion 数'),
    ),
    Control(
        name='batch_check',
        argument='batch_check',
        kind='choice',
        choices=('auto', 'documented', 'exact'),
        value='auto',
        en=('Batch check', "documented: the documentation's condition; exact: what training needs; auto: by the names of the sizes"),
        zh=('batch 检查', 'documented：文档中的条件；exact：只检查训练需要的条件；auto：按参数名决定'),
    ),
    Control(
        name='keep_global_batch',
        argument='keep_global_batch',
        kind='check',
        value=False,
        en=('Keep the global batch', 'As many completions a step as under data parallel alone'),
        zh=('保持 global batch', '每步的 completion 数与只用数据并行时相同'),
    ),
)
RECOMPUTE = (
    Control(
        name='recompute_granularity',
        argument='recompute_granularity',
        kind='choice',
        choices=('', 'full', 'selective', 'none'),
        en=('Recompute', 'Activations computed again instead of kept; empty: full'),
        zh=('重计算', '激活值重新计算而不保存；留空为 full'),
    ),
    Control(
        name='recompute_method',
        argument='recompute_method',
        kind='choice',
        choices=('', 'uniform', 'block'),
        en=('Recompute method', 'For full; empty: uniform'),
        zh=('重计算方式', '用于 full；留空为 uniform'),
    ),
    _size(
        'recompute_num_layers',
        'recompute_num_layers',
        ('Recompute layers', 'For full; empty: 1'),
        ('重计算层数', '用于 full；留空为 1'),
    ),
    Control(
        name='recompute_modules',
        argument='recompute_modules',
        en=('Recompute modules', 'For selective, separated by spaces; empty: core_attn'),
        zh=('重计算模块', '用于 selective，用空格分开；留空为 core_attn'),
    ),
)
ENGINES = (
    Control(
        name='use_vllm',
        argument='use_vllm',
        kind='check',
        value=True,
        mirrors='use_vllm',
        en=('Roll out with vLLM', 'Otherwise with transformers, in the training processes'),
        zh=('使用 vLLM 采样', '否则在训练进程中用 transformers 采样'),
    ),
    Control(
        name='vllm_mode',
        argument='vllm_mode',
        kind='choice',
        choices=('colocate', 'server'),
        value='colocate',
        mirrors='vllm_mode',
        en=('vLLM mode', 'colocate: in the training processes; server: `swift rollout`'),
        zh=('vLLM 模式', 'colocate：在训练进程中；server：使用 `swift rollout`'),
    ),
    Control(
        name='vllm_tensor_parallel_size',
        argument='vllm_tensor_parallel_size',
        value='1',
        mirrors='vllm_tensor_parallel_size',
        en=('vLLM tensor parallel', 'Of one colocated engine'),
        zh=('vLLM 张量并行', '一个 colocate 引擎的大小'),
    ),
    Control(
        name='sleep_level',
        argument='sleep_level',
        kind='choice',
        choices=('0', '1', '2'),
        value='0',
        mirrors='sleep_level',
        en=('Sleep level', 'Memory that vLLM gives back while training'),
        zh=('Sleep level', '训练时 vLLM 释放的显存'),
    ),
    Control(
        name='offload_model',
        argument='offload_model',
        kind='check',
        value=True,
        mirrors='offload_model',
        en=('Offload model', 'Weights leave the GPU during rollouts'),
        zh=('卸载模型', '采样时模型权重离开显存'),
    ),
    Control(
        name='offload_optimizer',
        argument='offload_optimizer',
        kind='check',
        value=True,
        mirrors='offload_optimizer',
        en=('Offload optimizer', 'Its state leaves the GPU during rollouts'),
        zh=('卸载优化器', '采样时优化器状态离开显存'),
    ),
)
SYNC = (
    Control(
        name='verify_weight_sync',
        argument='verify_weight_sync',
        kind='choice',
        choices=('first', 'off', '1', '10', '100'),
        free=True,
        value='first',
        en=('Weight-sync check', 'Checksums of all weights after a sync: the first, every N-th, or off'),
        zh=('权重同步检查', '同步后核对全部权重的校验和：首次、每 N 次，或关闭'),
    ),
    _size(
        'weight_sync_bucket_mb',
        'weight_sync_bucket_mb',
        ('Weight-sync bucket (MiB)', 'Empty: 512'),
        ('权重同步分桶(MiB)', '留空为 512'),
    ),
)
GROUPS = (PARALLEL, BATCH, RECOMPUTE, ENGINES, SYNC)
CONTROLS = (BACKEND, NUM_PROCESSES, *(control for group in GROUPS for control in group))

PLAN_KEY = PREFIX + 'plan_key'
"""The hidden element that says which command the plan on the page belongs to."""

OTHER_TEXTS = {
    'megatron_param': {'zh': 'Megatron 设置', 'en': 'Megatron settings'},
    'megatron_layout': {'zh': '并行布局', 'en': 'Layout'},
    'megatron_batch': {'zh': 'batch', 'en': 'Batch'},
    'megatron_recompute': {'zh': '重计算', 'en': 'Recompute'},
    'megatron_engine': {'zh': '采样引擎（与下方 Rollout 设置相同）', 'en': 'Rollout engine (the same settings as under Rollout below)'},
    'megatron_sync': {'zh': '权重同步', 'en': 'Weight sync'},
}


def locale() -> dict[str, dict[str, dict[str, str]]]:
    """The controls' words in the form of ms-swift's `locale_dict`."""
    words = {
        control.element: {
            'label': {'en': control.en[0], 'zh': control.zh[0]},
            'info': {'en': control.en[1], 'zh': control.zh[1]},
        }
        for control in CONTROLS
    }
    return {**words, **{name: {'label': label} for name, label in OTHER_TEXTS.items()}}


def arguments() -> dict[str, str]:
    """Element name to the argument that ms-swift writes behind its label."""
    return {control.element: f'--{control.argument}' for control in CONTROLS if control.argument}
