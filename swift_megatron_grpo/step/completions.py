"""What is logged of the answers themselves, under ms-swift's names (import tier 1). Pure."""
from __future__ import annotations

from collections.abc import Sequence

from ..types import Rollout


def completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """completions/mean_length, min_length, max_length, clipped_ratio (share that hit the limit), and num_turns where there are several.

    Lengths count the tokens that the policy sampled, over all turns.
    """
    lengths = [sum(sum(mask) for mask in rollout.response_loss_mask) if rollout.response_loss_mask else rollout.num_response_tokens
               for rollout in rollouts]
    metrics = {
        'completions/mean_length': sum(lengths) / len(lengths),
        'completions/min_length': float(min(lengths)),
        'completions/max_length': float(max(lengths)),
        'completions/clipped_ratio': sum(rollout.is_truncated for rollout in rollouts) / len(rollouts),
    }
    turns = [rollout.rollout_infos['num_turns'] for rollout in rollouts if 'num_turns' in rollout.rollout_infos]
    if turns:
        metrics['num_turns'] = sum(turns) / len(turns)
    return metrics
