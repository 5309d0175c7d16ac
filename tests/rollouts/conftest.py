"""The tests that start real rollout servers run with SWIFT_MEGATRON_GRPO_SERVER_TESTS=1 (`make test-server`): they are not yet part of the suite."""
import os

SERVER_TESTS = ['test_rollout_server.py', 'test_server_mode.py', 'test_server_training.py']
collect_ignore = [] if os.environ.get('SWIFT_MEGATRON_GRPO_SERVER_TESTS') == '1' else SERVER_TESTS
