"use strict";
(function () {
  var tools = document.querySelector(".tools");
  var query = document.getElementById("q");
  var found = document.getElementById("found");
  var criteria = Array.from(document.querySelectorAll(".criterion"));
  var texts = null;

  function show() {
    if (texts === null) { texts = criteria.map(function (one) { return one.textContent.toLowerCase(); }); }
    var words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    var tone = tools.querySelector("input[name=tone]:checked").value;
    var number = 0;
    criteria.forEach(function (one, index) {
      var fits = (tone === "" || one.dataset.tone === tone) && words.every(function (word) { return texts[index].includes(word); });
      one.hidden = !fits;
      number += fits ? 1 : 0;
    });
    found.textContent = number + " of " + criteria.length + " criteria";
  }

  if (tools) {
    tools.hidden = false;
    tools.addEventListener("input", show);
    tools.addEventListener("submit", function (event) { event.preventDefault(); });
  }

  function open_target() {
    var target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
    if (target && target.matches("details")) { target.hidden = false; target.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", open_target);
  open_target();

  document.querySelectorAll(".copy").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      var ticket = button.parentNode.querySelector("pre");
      getSelection().selectAllChildren(ticket);
      if (navigator.clipboard) { navigator.clipboard.writeText(ticket.textContent).then(function () { button.textContent = "Copied"; }); }
    });
  });

  var save = document.getElementById("save");
  var packed = document.getElementById("results");
  if (save && packed && window.DecompressionStream) {
    save.hidden = false;
    save.addEventListener("click", function () {
      var bytes = Uint8Array.from(atob(packed.textContent), function (sign) { return sign.charCodeAt(0); });
      var whole = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      new Response(whole).blob().then(function (blob) {
        var link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([blob], { type: "application/json" }));
        link.download = "results.json";
        link.click();
      });
    });
  }

  var closed = [];
  addEventListener("beforeprint", function () {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    closed.forEach(function (one) { one.open = true; });
  });
  addEventListener("afterprint", function () { closed.forEach(function (one) { one.open = false; }); });
})();
