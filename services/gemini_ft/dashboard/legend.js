import { SIGNS, css } from "/static/signs.js";

export default {
  template: `<ul class="legend" aria-label="What the signs mean">
    <li v-for="look in looks" :key="look"><svg viewBox="-1.3 -1.3 2.6 2.6" aria-hidden="true"
      ><g :class="'sign look-' + css(look)"><path :d="signs[look]" vector-effect="non-scaling-stroke" /></g></svg>{{ look }}</li>
  </ul>`,
  props: { looks: Array },
  data: () => ({ signs: SIGNS }),
  methods: { css },
};
