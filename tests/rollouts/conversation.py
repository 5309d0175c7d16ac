"""A plug-in for tests (--external_plugins): a scheduler of two turns, an environment, and rewards that read what they left."""
from swift.rewards import ORM, orms
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class TwoTurns(MultiTurnScheduler):
    """Says 'again' after the first answer; fails where it is asked to."""

    def step(self, infer_request, response_choice, current_turn):
        if infer_request.data_dict.get('solution') == 'fail':
            raise ValueError('the tool broke')
        infer_request.messages.append({'role': 'user', 'content': 'again'})
        return {'infer_request': infer_request, 'rollout_infos': {'seen': len(response_choice.token_ids)}}

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= 2


class Counting(Env):
    """Gives 0.25 for the first answer and 1 for the second; then it is over."""

    async def reset(self, config):
        self.turns = 0
        return 'count', {}, 'be brief'

    async def step(self, action):
        self.turns += 1
        return 'more', 0.25 if self.turns == 1 else 1.0, self.turns == 2, {}

    async def close(self):
        pass


class Turns(ORM):

    def __call__(self, completions, rollout_infos, **kwargs):
        return [float(infos['num_turns']) for infos in rollout_infos]


multi_turns['two_turns'] = TwoTurns
envs['counting'] = Counting
orms['turns'] = Turns
