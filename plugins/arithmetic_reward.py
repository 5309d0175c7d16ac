"""Reward of the demonstration: 1 when the completion is the solution and nothing else, 0 otherwise.

    swift rlhf ... --external_plugins plugins/arithmetic_reward.py --reward_funcs arithmetic_answer

The data set needs a column `solution`; ms-swift hands every column on by its name.
"""

from swift.rewards import ORM, orms


class ArithmeticAnswer(ORM):
    """Exact match of the whole text. A completion that was cut off at its length limit is longer than any solution, so it scores 0."""

    def __call__(self, completions: list[str], solution: list[str], **kwargs) -> list[float]:
        return [float(completion == answer) for completion, answer in zip(completions, solution, strict=True)]


orms['arithmetic_answer'] = ArithmeticAnswer
