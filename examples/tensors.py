"""Two programs exchange tensors: the least there is to p2pml.

    python examples/tensors.py serve tcp://127.0.0.1:7700      # in one terminal
    python examples/tensors.py double tcp://127.0.0.1:7700     # in another
"""

import asyncio
import sys

import numpy as np

from p2pml import Node, TensorLike, message


@message("example/matrix")
class Matrix:
    name: str
    values: TensorLike  # a numpy array, a torch tensor, or anything else with a buffer


async def serve(address: str) -> None:
    """Double every matrix that comes, and send it back to whom it came from."""
    async with Node("server", listen=[address]) as node:
        inbox = node.open("matrices")
        print("listening on", *node.addresses, flush=True)
        async for peer, matrix in inbox:  # no credit, no message: a slow server slows its clients down, and no queue grows
            doubled = 2 * matrix.values.numpy()
            await peer.send("matrices", Matrix(matrix.name, doubled))


async def double(address: str) -> None:
    """Send a matrix of 40 MB and check what comes back."""
    async with Node("client") as node:
        inbox = node.open("matrices")
        server = await node.dial(address)
        mine = np.arange(10_000_000, dtype=np.float32)
        await server.send("matrices", Matrix("numbers", mine))  # from the array's own memory to the socket
        peer, answer = await inbox.receive(timeout=30)  # and from the socket into the new array's
        assert np.array_equal(answer.values.numpy(), 2 * mine)
        print(f"{peer.id} doubled '{answer.name}': {answer.values}")


if __name__ == "__main__":
    asyncio.run({"serve": serve, "double": double}[sys.argv[1]](sys.argv[2]))
