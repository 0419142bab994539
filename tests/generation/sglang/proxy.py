"""A connection to a server that can be made to fail."""

import asyncio
import contextlib
import threading
import urllib.parse


class Proxy:
  """Forwards bytes; cuts a connection where `cuts` says so of a request."""

  def __init__(self, url):
    """`cuts` is called with the path of each request; none is cut at first."""
    self.cuts = lambda path: False
    self.num_cut = 0
    self._target = urllib.parse.urlsplit(url)
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()
    self._server = asyncio.run_coroutine_threadsafe(
      asyncio.start_server(self._serve, '127.0.0.1', 0), self._loop
    ).result()
    port = self._server.sockets[0].getsockname()[1]
    self.url = f'http://127.0.0.1:{port}'

  def close(self):
    asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  async def _end(self):
    self._server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.1)  # Until what was closed is.

  async def _serve(self, reader, writer):
    with contextlib.ExitStack() as stack:
      stack.callback(writer.close)
      there, back = await asyncio.open_connection(
        self._target.hostname, self._target.port
      )
      stack.callback(back.close)
      ways = [
        asyncio.ensure_future(self._forward(reader, back, writer)),
        asyncio.ensure_future(self._forward(there, writer)),
      ]
      for way in ways:
        stack.callback(way.cancel)
      with contextlib.suppress(ConnectionError):
        await asyncio.gather(*ways)

  async def _forward(self, source, sink, client=None):
    while data := await source.read(2**16):
      first = data.split(b'\r\n', 1)[0].split(b' ')
      is_request = client is not None and first[0] in (b'GET', b'POST')
      if is_request and self.cuts(first[1].decode()):
        self.num_cut += 1
        client.transport.abort()
        raise ConnectionResetError
      sink.write(data)
      await sink.drain()
    sink.close()
