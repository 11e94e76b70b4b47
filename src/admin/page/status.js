// Keeps the status page up to date, and sends what an operator wants. Without this the page is whole, and
// still; it loads itself again every ten seconds then.
'use strict';

(() => {
  const root = document.documentElement;
  const live = document.getElementById('live');
  const pause = document.getElementById('pause');

  // Makes `shown` what `fresh` is, and touches nothing that is the same: what has the focus, what is
  // selected, unfolded or typed stays.
  const KEPT = new Set(['open']);

  const morph = (shown, fresh) => {
    for (const { name, value } of [...fresh.attributes]) {
      if (!KEPT.has(name) && shown.getAttribute(name) !== value) shown.setAttribute(name, value);
    }
    for (const { name } of [...shown.attributes]) {
      if (!KEPT.has(name) && !fresh.hasAttribute(name)) shown.removeAttribute(name);
    }
    morphChildren(shown, fresh);
  };

  const alike = (a, b) =>
    a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id || '') === (b.id || '');

  const morphChildren = (shown, fresh) => {
    const known = new Map();
    for (const child of shown.children) if (child.id) known.set(child.id, child);
    let at = shown.firstChild;
    for (const next of [...fresh.childNodes]) {
      const same = next.id && known.get(next.id);
      if (same && same !== at) shown.insertBefore(same, at);
      const here = same || at;
      if (here && alike(here, next)) {
        if (here.nodeType === Node.ELEMENT_NODE) morph(here, next);
        else if (here.data !== next.data) here.data = next.data;
        at = here.nextSibling;
      } else {
        shown.insertBefore(next, at);
      }
    }
    while (at) {
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
  };

  const tellTimes = (within) => {
    for (const time of within.querySelectorAll('time')) {
      const moment = new Date(time.dateTime);
      const text = moment.toLocaleTimeString([], { hour12: false });
      if (time.textContent !== text) time.textContent = text;
      time.title = moment.toLocaleString();
    }
  };

  const update = (event) => {
    const shown = document.getElementById(event.type);
    const holder = document.createElement('template');
    holder.innerHTML = event.data;
    const fresh = holder.content.firstElementChild;
    if (!shown || !fresh) return;
    tellTimes(holder.content);
    morph(shown, fresh);
    say('live', 'live');
  };

  const say = (state, words) => {
    if (live.dataset.state === state) return;
    live.dataset.state = state;
    live.textContent = words;
  };

  let events = null;
  let renews = false;

  const listen = () => {
    events = new EventSource(`/events?span=${root.dataset.span}`);
    // The stream ends as planned, and the browser opens the next one.
    events.addEventListener('renew', () => { renews = true; });
    events.addEventListener('build', ({ data }) => {
      renews = false;
      if (data !== root.dataset.build) location.reload();
    });
    for (const part of ['gateway', 'classes', 'budgets', 'pools', 'tenants', 'misses', 'actions']) {
      events.addEventListener(part, update);
    }
    events.onerror = () => {
      const gaveUp = events.readyState === EventSource.CLOSED;
      if (renews && !gaveUp) {
        renews = false;
        return;
      }
      say('lost', gaveUp ? 'not live: reload the page' : 'connection lost, trying again');
    };
  };

  pause.hidden = false;
  pause.addEventListener('click', () => {
    const pauses = Boolean(events);
    if (pauses) {
      events.close();
      events = null;
      say('paused', 'paused');
    } else {
      listen();
    }
    pause.textContent = pauses ? 'Resume' : 'Pause';
  });

  const wish = (form, button) => {
    const value = (name) => form.elements[name]?.value;
    const seconds = value('for') ? Number(value('for')) : undefined;
    switch (form.dataset.post) {
      case '/-/drain': {
        const drain = button.value === 'true';
        const engine = form.elements.engine.selectedOptions[0];
        const order = { pool: engine?.dataset.pool, engine: engine?.value, drain };
        if (drain && seconds) order.for_seconds = seconds;
        if (drain && form.elements.last.checked) order.may_empty_pool = true;
        return order;
      }
      case '/-/degrade': {
        const level = value('level') === 'auto' ? 'auto' : Number(value('level'));
        const order = { class: value('class'), level };
        if (level !== 'auto' && seconds) order.for_seconds = seconds;
        return order;
      }
      default:
        return undefined;
    }
  };

  const words = (path, answer) => {
    if (path === '/-/drain') {
      return `${answer.engine} is ${answer.drained ? 'drained' : 'put back'}, with ${answer.in_flight} of our requests.`;
    }
    if (path === '/-/degrade') {
      return `Level ${answer.level} of ${answer.levels}${answer.forced ? ', by hand' : ', by measures'}.`;
    }
    return String(answer).trim();
  };

  document.addEventListener('submit', async (event) => {
    event.preventDefault();
    const form = event.target.closest('form[data-post]');
    if (!form) return;
    const told = document.getElementById('told');
    const token = document.getElementById('token')?.value;
    const body = wish(form, event.submitter);
    const headers = token ? { authorization: `Bearer ${token}` } : {};
    if (body) headers['content-type'] = 'application/json';
    try {
      const response = await fetch(form.dataset.post, {
        method: 'POST',
        headers,
        body: body && JSON.stringify(body),
        cache: 'no-store',
      });
      const text = await response.text();
      const isJson = response.headers.get('content-type')?.startsWith('application/json');
      told.dataset.state = response.ok ? 'done' : 'refused';
      told.textContent = response.ok
        ? words(form.dataset.post, isJson ? JSON.parse(text) : text)
        : `Refused (${response.status}): ${text.trim()}`;
    } catch {
      told.dataset.state = 'refused';
      told.textContent = 'No answer: is the gateway there?';
    }
  });

  tellTimes(document);
  listen();
})();
