"""What the demonstration leaves behind: the reward curve as a PNG, and answers before and after side by side."""

from collections.abc import Sequence
from pathlib import Path

from examples.demo.problems import Problem


def draw_curve(rewards: Sequence[float], path: Path, *, before: float, after: float) -> Path:
    """Reward of each optimizer step with its running mean of 8, and the two measured accuracies as lines."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color='tab:blue', alpha=0.3, label='reward of a step')
    means = [sum(rewards[max(0, i - 7) : i + 1]) / len(rewards[max(0, i - 7) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, means, color='tab:blue', label='mean of 8 steps')
    axes.axhline(before, color='tab:gray', linestyle=':', label=f'held-out accuracy before: {before:.3f}')
    axes.axhline(after, color='tab:green', linestyle='--', label=f'held-out accuracy after: {after:.3f}')
    axes.set(xlabel='optimizer step', ylabel='share of right answers', ylim=(0, 1), title='Two-digit sums, GRPO on Megatron-Core, TP 2')
    axes.legend(loc='lower right')
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def compare(problems: Sequence[Problem], before: Sequence[str], after: Sequence[str]) -> str:
    """A small table: question, right answer, one sampled answer before and one after."""
    rows = [f'{"question":24s}{"right":>7s}{"before":>9s}{"after":>8s}']
    for problem, first, second in zip(problems, before, after):
        rows.append(f'{problem.question:24s}{problem.answer:>7s}{first!r:>9s}{second!r:>8s}')
    return '\n'.join(rows)
