"""A patch says why it exists, is applied once, and is listed."""

import pytest

from swift_megatron_grpo.passport import Passport, PatchRegistry

GIVEN = {
    'name': 'one',
    'target': 'json:dumps',
    'breaks': 'nothing',
    'reference': 'json/__init__.py',
    'versions': 'python>=3.11',
    'remove_when': 'never needed',
}


def test_a_patch_is_applied_once_and_in_order_of_declaration():
    registry, calls = PatchRegistry('test'), []
    registry.patch(Passport(**GIVEN))(lambda: calls.append('one'))
    registry.patch(Passport(**{**GIVEN, 'name': 'two'}))(lambda: calls.append('two'))
    assert registry.apply() == ['one', 'two']
    assert registry.apply() == []
    assert registry.apply('two') == []
    assert calls == ['one', 'two']
    assert registry.applied == ['one', 'two'] and len(registry) == 2


def test_a_patch_that_raises_is_not_counted_as_applied():
    registry, calls = PatchRegistry('test'), []

    def fails_once():
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError('no')

    patch = registry.patch(Passport(**GIVEN))(fails_once)
    with pytest.raises(RuntimeError):
        registry.apply('one')
    assert registry.applied == []
    assert patch() is True and patch() is False
    assert len(calls) == 2


@pytest.mark.parametrize('field', sorted(GIVEN))
def test_a_passport_with_an_empty_field_is_refused(field):
    with pytest.raises(ValueError, match=field):
        Passport(**{**GIVEN, field: '  '})


def test_a_target_names_a_module_and_an_attribute():
    with pytest.raises(ValueError, match='module:attribute'):
        Passport(**{**GIVEN, 'target': 'json.dumps'})
    assert Passport(**{**GIVEN, 'target': 'json:dumps, json:loads'}).target == 'json:dumps, json:loads'


def test_two_patches_of_one_name_and_an_unknown_name_are_refused():
    registry = PatchRegistry('test')
    registry.patch(Passport(**GIVEN))(lambda: None)
    with pytest.raises(ValueError, match="two patches are called 'one'"):
        registry.patch(Passport(**GIVEN))
    with pytest.raises(KeyError, match="no patch called 'three'"):
        registry.apply('three')
