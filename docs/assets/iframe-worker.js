// The site's search is a Worker, which browsers refuse to a page that is read from a folder: there it runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true });
      frame.srcdoc = `<script src="${url}"></` + "script>";
      this.inside = new Promise((ready) => frame.onload = () => ready(frame.contentWindow)).then((inside) => {
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        return inside;
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
