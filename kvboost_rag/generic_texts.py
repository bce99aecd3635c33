"""Invented texts of no particular subject, for documents to be encoded after."""

from __future__ import annotations

__all__ = ["CONTEXT_TEXTS", "PROBE_TEXT"]

_BRIDGE = (
    "The old bridge over the river Tamber was finished in 1874, after eleven years of work. It was planned by the "
    "engineer Maria Holt, who had studied in Vienna, and it is 212 metres long. In the winter of 1929 the ice carried "
    "two of its pillars away, and until they were rebuilt, people crossed the water by boat. Since 1987 the bridge has "
    "been closed to cars; it is lit at night and is the sign of the town."
)

_HERON = (
    "The reed heron is a bird of shallow lakes and slow rivers. It is about ninety centimetres tall, grey above and "
    "white below, and it feeds on fish, frogs and large insects, which it waits for without moving. Pairs nest in "
    "colonies of up to forty, high in old willows; both parents sit on the three to five eggs for twenty-six days. "
    "In cold years most herons leave for the coast in October and come back in March."
)

CONTEXT_TEXTS = (_BRIDGE, _HERON)
"""The canonical context of ``context_documents="generic"``: two texts, because one alone helps less."""

PROBE_TEXT = (
    'Lena Marsh (born 3 May 1951) is a retired singer and actress. She grew up on a farm near Dover, sang in the choir '
    'of her school, and made her first record, "Small Rain", at the age of nineteen. She appeared in six films, among '
    "them The Long Corridor (1978), for which she won two prizes. In 1992 she left the stage and founded a school of "
    "music, which has taught more than four thousand children."
)
"""The other context by which :mod:`kvboost_rag.sensitivity` measures what a context changes."""
