// Search of pages that are opened from disk. A browser starts no Worker from a file:// page, so the theme's search worker
// runs in a hidden frame there. The theme creates `Worker` and looks for the name `IFrameWorker`; this file is that shim.
"use strict";

if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.url = url;
      this.waiting = []; // messages that came before the script was loaded
    }

    postMessage(data) {
      if (!this.waiting) return this.deliver(data);
      this.waiting.push(data);
      if (!this.frame) this.load(); // with the first message: a page on which nothing is searched loads no frame
    }

    load() {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      this.frame.addEventListener("load", () => this.start(), { once: true });
      this.frame.srcdoc = `<script src="${this.url}"></script>`;
      document.body.append(this.frame);
    }

    start() {
      // The script calls postMessage to answer. A window's own function would send the answer to the script itself.
      this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const waiting = this.waiting;
      this.waiting = null;
      for (const data of waiting) this.deliver(data);
    }

    deliver(data) {
      const target = this.frame.contentWindow;
      target.dispatchEvent(new target.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame?.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
