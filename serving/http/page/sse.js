// SPDX-License-Identifier: Apache-2.0
// Server-sent events out of a body of bytes (WHATWG HTML, section 9.2), as far as an API's stream needs them.

/**
 * The data of each event, in order. An event that the body breaks off in is dropped, as the standard has it.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A carriage return at the end may be half of a line's end.
      const usable = done || !rest.endsWith("\r") ? rest.length : rest.length - 1;
      const lines = rest.slice(0, usable).split(/\r\n|\n|\r/);
      rest = lines.pop() + rest.slice(usable);
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    // Whoever stops reading ends the connection, by which the server learns of it.
    reader.cancel().catch(() => {});
  }
}
