// The two dialogs: which key, and whether a change is really meant, by whom and why.
import { isKey } from "./api.js";
import { $, say, show } from "./dom.js";
import { t } from "./preferences.js";

let confirmed = null;

/** Fits both dialogs. `open(key)` tries a key. */
export function connectDialogs(open) {
  for (const button of document.querySelectorAll("dialog [data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  $("key-dialog").addEventListener("close", () => {
    $("key-input").value = "";
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = $("key-input").value.trim();
    if (!isKey(key)) return complain("key-error", t("key.letters"));
    $("key-dialog").close();
    return open(key);
  });
  $("confirm-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("confirm-dialog").addEventListener("close", () => {
    confirmed = null;
  });
}

export function askKey(error = "") {
  complain("key-error", error);
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key-input").focus();
}

/** Asks for author and reason, and hands them to `act`, whose refusal is shown in the dialog. The author is kept for the next time. */
export function confirm({ title, effect, danger, act }) {
  confirmed = act;
  say($("confirm-title"), title);
  say($("confirm-effect"), effect);
  say($("confirm-submit"), title);
  $("confirm-submit").className = danger ? "danger" : "primary";
  $("confirm-submit").disabled = false;
  $("confirm-reason").value = "";
  complain("confirm-error", "");
  $("confirm-dialog").showModal();
  ($("confirm-author").value ? $("confirm-reason") : $("confirm-author")).focus();
}

async function submit() {
  const act = confirmed;
  const [author, reason] = [$("confirm-author").value.trim(), $("confirm-reason").value.trim()];
  if (!author || !reason) return complain("confirm-error", t("confirm.missing"));
  $("confirm-submit").disabled = true;
  say($("confirm-submit"), t("confirm.busy"));
  try {
    await act({ author, reason });
    if (confirmed === act) $("confirm-dialog").close();
  } catch (error) {
    if (confirmed !== act) return undefined;
    complain("confirm-error", error.status === 0 ? t("confirm.unreached") : error.message);
    $("confirm-submit").disabled = false;
    say($("confirm-submit"), $("confirm-title").textContent);
  }
  return undefined;
}

function complain(id, text) {
  say($(id), text);
  show($(id), text !== "");
}
