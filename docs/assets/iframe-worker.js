// Browsers start no worker from a page on disk. There, the search's worker runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<script><\/script>"
      frame.onload = () => {
        this.inside = frame.contentWindow
        this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        this.inside.importScripts = (...all) => all.reduce((done, one) => done.then(() => this.load(one)), Promise.resolve())
        this.load(address).then(() => this.waiting.splice(0).forEach(data => this.postMessage(data)))
      }
      document.body.append(frame)
    }
    load(address) {
      return new Promise((done, fail) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: address, onload: () => { this.ready = true; done() }, onerror: fail })
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      if (this.ready) this.inside.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
  }
}
