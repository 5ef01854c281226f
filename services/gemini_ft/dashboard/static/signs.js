// In a square from -1 to 1. A shape for each state: colour is not the only signal.
export const SIGNS = {
  "in a job": "M-.8,0A.8,.8 0 1 0 .8,0A.8,.8 0 1 0 -.8,0Z",
  free: "M-.7,0A.7,.7 0 1 0 .7,0A.7,.7 0 1 0 -.7,0Z",
  standby: "M-.7,0A.7,.7 0 1 0 .7,0A.7,.7 0 1 0 -.7,0ZM-.2,0A.2,.2 0 1 0 .2,0A.2,.2 0 1 0 -.2,0Z",
  suspected: "M0,-.85L.9,.75L-.9,.75Z",
  failed: "M-.7,-.7L.7,.7M-.7,.7L.7,-.7",
  "not heard yet": "M-.7,.6h.1M-.05,.6h.1M.6,.6h.1",
  draining: "M0,-.8V.6M-.6,0L0,.7L.6,0",
  cordoned: "M-.7,-.7H.7V.7H-.7Z M-.4,0H.4",
};

export function css(look) {
  return look.replaceAll(" ", "-");
}
