"""LlamaIndex: index documents, precompute their KV, ask; embeddings and answers both come from this machine."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.llms.kvboost import KVBoostLLM, KVBoostQueryEngine, MiniLMEmbedding, collect_reports

from kvboost_rag.demo_documents import demo_documents

if __name__ == "__main__":
    documents = [Document(id_=d.id, text=d.text, metadata=dict(d.metadata)) for d in demo_documents()[:5]]
    index = VectorStoreIndex.from_documents(documents, embed_model=MiniLMEmbedding())
    llm = KVBoostLLM("smollm2", max_tokens=24, temperature=0)
    query_engine = KVBoostQueryEngine.from_index(index, llm, similarity_top_k=3)
    for question in ("What is the basic unit of territorial division in Poland?", "Is a Polish city a commune?"):
        with collect_reports() as reports:
            print(query_engine.query(question))
        print(*reports, sep="\n")
