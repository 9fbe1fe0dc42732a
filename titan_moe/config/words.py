"""Numbers in sentences for people."""


def counted(number: int, noun: str) -> str:
    """`1 row`, `0 rows`, `8 micro-batches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"
