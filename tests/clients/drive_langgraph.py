"""langgraph: a graph of model and tools, with langchain-openai and langchain-anthropic."""

from functools import partial

from driving import MODEL, SYSTEM, TASK, look, main
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def chat(root: str, **options: object) -> BaseChatModel:
    return ChatOpenAI(model=MODEL, base_url=f"{root}/v1", api_key="any", **options)


def messages(root: str) -> BaseChatModel:
    return ChatAnthropic(model=MODEL, base_url=root, api_key="any", max_tokens=400)


def play(root: str, model_of: object, stream: bool = False) -> str:
    tools = [tool(look)]
    model = model_of(root).bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    agent = graph.compile()
    given = {"messages": [("system", SYSTEM), ("user", TASK)]}
    if not stream:
        return agent.invoke(given)["messages"][-1].text
    said, node = "", ""
    for piece, of in agent.stream(given, stream_mode="messages"):
        if of["langgraph_node"] == "model":
            said = said * (node == "model") + piece.text
        node = of["langgraph_node"]
    return said


main(
    {
        "chat": partial(play, model_of=chat),
        "chat streamed": partial(play, model_of=chat, stream=True),
        "responses": partial(play, model_of=partial(chat, use_responses_api=True)),
        "responses streamed": partial(
            play, model_of=partial(chat, use_responses_api=True), stream=True
        ),
        "messages": partial(play, model_of=messages),
        "messages streamed": partial(play, model_of=messages, stream=True),
    }
)
