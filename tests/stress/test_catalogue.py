"""The catalogue of attacks has an entry for every field of a request body and for every setting that limits callers."""

from __future__ import annotations

from collections import Counter

from bertserve.service.settings import Settings
from catalogue import ATTACK_ON_SETTING, ATTACKS, WITHOUT_LIMIT
from field_attacks import COSTLIEST
from request_fields import all_fields

FIELDS = {field.name for field in all_fields()}


def test_every_field_of_a_request_body_is_attacked() -> None:
    assert set() == FIELDS - set().union(*(attack.covers for attack in ATTACKS)), "fields without a line in field_attacks.COSTLIEST"


def test_every_attacked_field_exists() -> None:
    assert set() == set(COSTLIEST) - FIELDS, "lines of field_attacks.COSTLIEST for fields that do not exist"


def test_every_setting_is_attacked_or_does_not_limit_callers() -> None:
    """A new setting must be added to `catalogue.ATTACK_ON_SETTING` or to `catalogue.WITHOUT_LIMIT`."""
    assert set(Settings.model_fields) == set(ATTACK_ON_SETTING) | WITHOUT_LIMIT
    assert set() == set(ATTACK_ON_SETTING) & WITHOUT_LIMIT
    assert set() == set(ATTACK_ON_SETTING.values()) - {attack.name for attack in ATTACKS}


def test_names_of_attacks_are_unique() -> None:
    assert [] == [name for name, count in Counter(attack.name for attack in ATTACKS).items() if count > 1]
