"""What `unisono check` says of pages beyond their tokens: where their target shows."""

from datamodules.files.bad_rows import BadRows
from datamodules.text.page_store import PageRequest


def page_warnings(request: PageRequest) -> list[str]:
    """Return what a user should know of pages that repeat what is to be written.

    Args:
        request: of the store; all files are read.
    """
    num_pages = num_removed = num_holding = 0
    for _, _, page in request.pages(BadRows("collect")):
        num_pages += 1
        num_removed += page.num_removed > 0
        num_holding += page.holds_target
    found = []
    if num_removed:
        found.append(
            f"{num_removed:,} of {num_pages:,} pages have their {request.target} as a line of "
            "its own, such as the h1; it is taken out."
        )
    if num_holding:
        found.append(
            f"{num_holding:,} of {num_pages:,} pages hold the words of their {request.target} "
            "within a longer passage; it stays, and copying it is part of what is learnt."
        )
    return found
