// Browsers start no worker for a page on the disk, and the theme searches in one. There a hidden frame runs the worker's script; the
// script looks for `IFrameWorker` in its parent, and then finds its files beside itself.
"use strict";

class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.frame = frame;
    const scope = frame.contentWindow;
    // Without a document of its own, a browser may replace the empty one later, with all that was set on it.
    scope.document.open();
    scope.document.write("<!doctype html><body></body>");
    scope.document.close();
    scope.postMessage = (data) => setTimeout(() => this.#deliver(structuredClone(data)));
    scope.importScripts = (...urls) =>
      urls.reduce((earlier, next) => earlier.then(() => IFrameWorker.#load(scope, next)), Promise.resolve());
    this.loaded = IFrameWorker.#load(scope, url);
    this.loaded.catch((error) => this.dispatchEvent(new ErrorEvent("error", { error, message: String(error) })));
  }

  static #load(scope, url) {
    return new Promise((resolve, reject) => {
      const script = scope.document.createElement("script");
      script.src = String(url);
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${url}`));
      scope.document.body.append(script);
    });
  }

  #deliver(data) {
    const event = new MessageEvent("message", { data });
    this.dispatchEvent(event);
    if (this.onmessage) this.onmessage(event);
  }

  postMessage(data) {
    const message = new MessageEvent("message", { data: structuredClone(data) });
    this.loaded.then(() => this.frame.contentWindow.dispatchEvent(message)).catch(() => {});
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
