"""Invented texts of things that never were, for documents to be encoded after."""

from __future__ import annotations

__all__ = ["CONTEXT_TEXTS", "PROBE_TEXT"]

_FILM = (
    "The Winter Harbour\n"
    "The Winter Harbour is a 1978 British drama film directed by Alan Verney and starring Ruth Avery, Robert Fenn "
    "and Clara Dale. Based on the novel of the same name by Edith Crane, it tells the story of a teacher who "
    "returns to the school of her childhood. The film was shot in Yorkshire and received two awards at the festival "
    "of San Remo; it is the last film of its director."
)

_BRIDGE = (
    "Tamber Bridge\n"
    "The old bridge over the river Tamber was finished in 1874, after eleven years of work. It was planned by the "
    "engineer Maria Holt, who had studied in Vienna, and it is 212 metres long. In the winter of 1929 the ice carried "
    "two of its pillars away, and until they were rebuilt, people crossed the water by boat. Since 1987 the bridge has "
    "been closed to cars; it is lit at night and is the sign of the town."
)

CONTEXT_TEXTS = (_FILM, _BRIDGE)
"""The canonical context of ``context_documents="generic"``: two texts as an encyclopaedia has them, with titles and
names. One alone helps less, and so do tales without titles (``docs/repair-frontier.md``)."""

PROBE_TEXT = (
    'Lena Marsh (born 3 May 1951) is a retired singer and actress. She grew up on a farm near Dover, sang in the choir '
    'of her school, and made her first record, "Small Rain", at the age of nineteen. She appeared in six films, among '
    "them The Long Corridor (1978), for which she won two prizes. In 1992 she left the stage and founded a school of "
    "music, which has taught more than four thousand children."
)
"""The other context by which :mod:`kvboost_rag.sensitivity` measures what a context changes."""
