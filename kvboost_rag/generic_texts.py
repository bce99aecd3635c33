"""Invented texts of things that never were, for documents to be encoded after."""

from __future__ import annotations

__all__ = ["CONTEXT_TEXTS", "PROBE_TEXT"]

_FILM = (
    "The Winter Harbour\n"
    "The Winter Harbour is a 1978 British drama film directed by Alan Verney and starring Ruth Avery, Robert Fenn "
    "and Clara Dale. Based on the novel of the same name by Edith Crane, it tells the story of a teacher who "
    "returns to the school of her childhood. The film was shot in Yorkshire and received two awards at the "
    "festival of San Remo; it is the last film of its director."
)

_BRIDGE = (
    "Tamber Bridge\n"
    "The old bridge over the river Tamber was finished in 1874, after eleven years of work. It was planned by the "
    "engineer Maria Holt, who had studied in Vienna, and it is 212 metres long. In the winter of 1929 the ice "
    "carried two of its pillars away, and until they were rebuilt, people crossed the water by boat. Since 1987 "
    "the bridge has been closed to cars; it is lit at night and is the sign of the town."
)

_PLAYER = (
    "Tom Aldous\n"
    "Thomas James Aldous (12 March 1946 – 9 July 2011) was an English footballer who played as a goalkeeper for "
    "Marlow Town, Easton Rovers and the national team. He won the cup twice, in 1969 and 1971, and was named "
    "player of the year in between. After a broken wrist ended his career, he trained young keepers in Canada and "
    "wrote a column for a weekly paper."
)

_TOWN = (
    "Brannow\n"
    "Brannow is a municipality in the district of Lower Selde, in the north of the country. It lies on both banks "
    "of the Orle, some 40 kilometres east of the capital, and had 8,214 inhabitants in 2016. The town was first "
    "mentioned in 1243. Its church burned down in 1688 and was built anew in brick. Most people work in the paper "
    "mill or travel to the capital by train."
)

_MOTH = (
    "Grey lantern moth\n"
    "The grey lantern moth is a species of moth in the family Erebidae. It is found in the mountain forests of "
    "southern Asia, from 900 to 2,400 metres. The wings span 31 to 38 millimetres and are pale grey with a yellow "
    "spot. Adults fly from May to August, depending on the height. The larvae feed on willow and alder, and spend "
    "the winter in a cocoon under the bark."
)

_COMPANY = (
    "Harlan & Pike\n"
    "Harlan & Pike was an American maker of clocks and scales, founded in Dayton, Ohio, in 1891 by Joseph Harlan "
    "and his brother-in-law Samuel Pike. By 1920 it employed 1,400 people and sold its products in thirty "
    "countries. The company was bought by the Norwell Group in 1963 for $21 million, and its last factory, in "
    "Toledo, closed in 1982. Its archive is kept by the state university."
)

_SIEGE = (
    "Siege of Port Canning\n"
    "The siege of Port Canning took place from September 1757 to February 1758, during the war between the two "
    "crowns. A force of 6,000 men under General Lacombe surrounded the town, which was held by Colonel Hewitt with "
    "fewer than 900. When a fleet with food and powder broke through the blockade, Lacombe withdrew to the river, "
    "having lost a third of his men to fever. Historians see in it the turning point of the campaign."
)

_ALBUM = (
    "Letters from the Coast\n"
    "Letters from the Coast is the third studio album by the Irish band Slow Harbour, released on 14 October 2003 "
    "by Tideline Records. It was recorded in nine days in a farmhouse near Galway and produced by Nora Quill. The "
    'single "Paper Lighthouse" reached number four in the charts and was used in a television series. Critics '
    "praised the singing and the sparse arrangements."
)

_FIRST, _SECOND = (_FILM, _BRIDGE, _PLAYER, _TOWN), (_MOTH, _COMPANY, _SIEGE, _ALBUM)

CONTEXT_TEXTS = ("\n\n".join(_FIRST), "\n\n".join(_SECOND))
"""The canonical context of ``context_documents="generic"``: texts as an encyclopaedia has them, with titles and names,
four in a row beside four others. Fewer help less, and so do tales without titles (``docs/repair-frontier.md``)."""

PROBE_TEXT = (
    'Lena Marsh (born 3 May 1951) is a retired singer and actress. She grew up on a farm near Dover, sang in the choir '
    'of her school, and made her first record, "Small Rain", at the age of nineteen. She appeared in six films, among '
    "them The Long Corridor (1978), for which she won two prizes. In 1992 she left the stage and founded a school of "
    "music, which has taught more than four thousand children."
)
"""The other context by which :mod:`kvboost_rag.sensitivity` measures what a context changes."""
