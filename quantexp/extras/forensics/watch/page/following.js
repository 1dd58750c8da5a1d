// Asks the server what has changed since the last answer, every second, and says so when there is no answer. A server
// that was started again is told by its name, and sends everything. `receive` returns whether it waits for the first runs.

const EVERY_MS = 1000, HIDDEN_MS = 10000, FIRST_MS = 100;

function follow(receive, announce) {
  let server = "", version = 0, timer = null, failures = 0;

  async function ask() {
    let waits = false;
    try {
      const answer = await answerTo(`state?server=${encodeURIComponent(server)}&since=${version}`);
      failures = 0;
      ({ server, version } = answer);
      waits = receive(answer);
    } catch (error) {
      failures += 1;
      if (error instanceof Refused) announce("lost", "this address is no longer valid; quantexp watch prints the present one");
      else announce("lost", `no answer from the server, trying again (${failures})`);
    }
    timer = setTimeout(ask, document.hidden ? HIDDEN_MS : waits ? FIRST_MS : EVERY_MS);
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    clearTimeout(timer);
    ask();
  });
  ask();
}

class Refused extends Error {}

async function answerTo(address) {
  const response = await fetch(address, { cache: "no-store", credentials: "omit" });
  if (response.status === 403) throw new Refused();
  if (!response.ok) throw new Error(String(response.status));
  return response.json();
}
