"""Index documents once, then ask about them in any order."""

from kvboost_rag import Document, KVBoostEngine

DOCUMENTS = [
    Document("rooms", "The meeting is on Tuesday in the blue room, which is on the second floor behind the library."),
    Document("food", "Lunch is served in the garden from noon to two; there is soup, bread and cheese for everyone."),
    Document("travel", "The last train to the city leaves at nine in the evening from the northern platform."),
]

with KVBoostEngine.from_pretrained("smollm2") as engine:
    engine.add_documents(DOCUMENTS)
    for order in (["rooms", "food", "travel"], ["travel", "rooms", "food"]):
        result = engine.generate("Where is the meeting?", documents=order, max_tokens=24, temperature=0)
        print(result.text)
        print(result.report)
