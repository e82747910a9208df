"""A small MCP server, over stdio or HTTP: a store of its own, and tools that do wrong.

python tool_server.py            # stdio
python tool_server.py PORT       # streamable HTTP
"""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("store")
kept: dict[str, str] = {}


@server.tool()
def put(key: str, value: str) -> str:
    """Keeps a value."""
    kept[key] = value
    return f"{len(kept)} kept"


@server.tool(name="get.value")
def get(key: str) -> str:
    """The value of a key."""
    return kept[key]


@server.tool()
def place() -> str:
    """Where the server runs, its process, and what it was told."""
    return f"{os.getcwd()} {os.getpid()} {os.environ.get('TOLD')} {os.environ.get('SECRET')}"


@server.tool()
async def slow() -> str:
    """Never ends."""
    await asyncio.sleep(60)
    return ""


@server.tool()
def die() -> str:
    """Takes the server down."""
    print("about to die", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
