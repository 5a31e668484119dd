// Puts the invite of the link into the form, and takes it out of the address, so that it is in no history.
"use strict";
(() => {
  const invite = location.hash.slice(1);
  if (invite === "") { return; }
  history.replaceState(null, "", location.pathname);
  document.getElementById("invite").value = invite;
})();
