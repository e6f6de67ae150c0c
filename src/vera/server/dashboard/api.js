// The admin routes. The key is a variable of this module and nowhere else: not in storage, not in an address.

const PATIENCE_MS = 15_000;

let key = null;

/** What the server said instead of an answer. `status` 0: it said nothing. */
export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(value) {
  key = value;
}

export function hasKey() {
  return key !== null;
}

/** A header takes no others. */
export function isKey(value) {
  return /^[\x21-\x7e]+$/.test(value);
}

export const getStats = () => ask("GET", "admin/stats");
export const getPages = (request) => ask("GET", `admin/requests/${encodeURIComponent(request)}/pages`);
export const post = (path, body) => ask("POST", path, body);

/** The answer's JSON. Throws a Refusal. Paths are relative to the page's, so that a proxy may put both elsewhere. */
async function ask(method, path, body) {
  const headers = { Accept: "application/json" };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response, text;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    text = await response.text();
  } catch (error) {
    throw new Refusal(0, null, error.message);
  }
  const answer = parsed(text);
  if (response.ok && answer !== null && typeof answer === "object") return answer;
  const told = answer?.error ?? {};
  throw new Refusal(response.status, told.code ?? null, told.message ?? `${response.status} ${response.statusText}`);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
