"""What only one policy draws is refused under the others, never drawn in another way."""

from vescale_rng._errors import PolicyError
from vescale_rng._policy import policy


def native_only(what: str) -> None:
    """Refuse ``what`` unless the policy "native" is in force.

    Raises:
        PolicyError: another policy is.
    """
    if policy() != "native":
        raise PolicyError(
            f'{what} is drawn by the policy "native" only, and "{policy()}" is in force: put '
            '`with use("native"):` around this call'
        )
