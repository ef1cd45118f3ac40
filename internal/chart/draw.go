package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"strings"
)

// The measures of the chart, in pixels.
const (
	width      = 980
	plotLeft   = 290 // plotLeft is where the axis begins.
	plotRight  = 700 // plotRight is where the axis ends.
	valueLeft  = 722 // valueLeft is where the column with the figures begins.
	top        = 84  // top is the height of the part above the first panel.
	rowHeight  = 20
	titleSpace = 34 // titleSpace is the height of a panel's title.
	bottom     = 34 // bottom is the height of the part below the last panel.
)

// axis is a logarithmic axis from its first tick to its last one, which differ.
type axis struct{ ticks []float64 }

// newAxis returns the axis that holds all points. Its ticks are 1, 2 and 5 times powers of
// ten, and 1 is one of them.
func newAxis(panels []*panel) axis {
	low, high := 1.0, 2.0
	for _, p := range panels {
		for _, r := range p.rows {
			for _, pt := range []*point{r.plain, r.series} {
				if pt != nil {
					low, high = min(low, pt.low), max(high, pt.high)
				}
			}
		}
	}
	var a axis
	for e := math.Floor(math.Log10(low)); ; e++ {
		for _, k := range []float64{1, 2, 5} {
			v := k * math.Pow(10, e)
			if v <= low {
				a.ticks = nil // The axis need not begin before v.
			}
			a.ticks = append(a.ticks, v)
			if v >= high {
				return a
			}
		}
	}
}

// x returns where a speed lies.
func (a axis) x(speed float64) float64 {
	first, last := math.Log(a.ticks[0]), math.Log(a.ticks[len(a.ticks)-1])
	return plotLeft + (plotRight-plotLeft)*(math.Log(speed)-first)/(last-first)
}

// drawing collects the elements of the chart.
type drawing struct{ bytes.Buffer }

func (d *drawing) add(format string, args ...any) { fmt.Fprintf(&d.Buffer, format+"\n", args...) }

// text adds a text with the attributes that attr has.
func (d *drawing) text(x, y float64, attr, text string) {
	if attr != "" {
		attr = " " + attr
	}
	d.add(`<text x="%.1f" y="%.1f"%s>%s</text>`, x, y, attr, escape(text))
}

// dot adds the whisker and the dot of a point.
func (d *drawing) dot(a axis, pt *point, y float64, hollow bool) {
	fill := "#1f6fb4"
	if hollow {
		fill = "white"
	}
	d.add(`<path d="M%.1f %.1fH%.1f" stroke="#1f6fb4" stroke-width="1.5"/><circle cx="%.1f" cy="%.1f" r="4.5" fill="%s" stroke="#1f6fb4" stroke-width="1.5"/>`,
		a.x(pt.low), y, a.x(pt.high), a.x(pt.speed), y, fill)
}

// draw returns the chart as SVG.
func draw(panels []*panel) []byte {
	height := top + bottom
	for _, p := range panels {
		height += titleSpace + rowHeight*len(p.rows)
	}
	a := newAxis(panels)
	var d drawing
	d.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" font-family="sans-serif" font-size="12">`,
		width, height, width, height)
	d.add(`<title>rdmanet compared with TCP</title>`)
	d.add(`<desc>For each case: how many times as fast as TCP rdmanet is, on a logarithmic axis, with quartiles.</desc>`)
	d.add(`<rect width="100%%" height="100%%" fill="white"/>`)
	d.text(20, 26, `font-size="16" font-weight="bold"`, "How many times as fast as TCP is rdmanet?")
	d.text(20, 46, `fill="#555"`, "Dots are medians, whiskers span the quartiles. For times the inverse of the ratio is shown.")
	d.text(a.x(1)-8, top-22, `text-anchor="end" fill="#555"`, "← TCP is faster")
	d.text(a.x(1)+8, top-22, `fill="#555"`, "rdmanet is faster →")
	d.text(valueLeft, top-22, `fill="#555"`, "TCP, rdmanet")
	for _, t := range a.ticks {
		color, w := "#ddd", 1.0
		if t == 1 {
			color, w = "#333", 1.5
		}
		d.add(`<path d="M%.1f %dV%d" stroke="%s" stroke-width="%g"/>`, a.x(t), top, height-bottom, color, w)
		for _, y := range []int{top - 6, height - bottom + 16} {
			d.text(a.x(t), float64(y), `text-anchor="middle"`, fmt.Sprintf("%g", t))
		}
	}
	y := float64(top)
	for _, p := range panels {
		d.add(`<rect x="%d" y="%.1f" width="%d" height="20" fill="#eef3f8"/>`, 12, y+8, width-24)
		d.text(20, y+22, `font-size="13" font-weight="bold"`, p.title)
		if p.series != "" {
			d.text(valueLeft, y+22, "", "hollow dots: "+p.series)
		}
		y += titleSpace
		for _, r := range p.rows {
			mid := y + rowHeight/2
			d.text(plotLeft-14, mid+4, `text-anchor="end"`, r.name)
			if r.series != nil {
				d.dot(a, r.series, mid, true)
			}
			if r.plain != nil {
				d.dot(a, r.plain, mid, false)
			}
			d.text(valueLeft, mid+4, "", r.figures())
			y += rowHeight
		}
	}
	d.add("</svg>")
	return d.Bytes()
}

// figures returns the measured figures of a row.
func (r *row) figures() string {
	var parts []string
	for _, pt := range []*point{r.plain, r.series} {
		if pt != nil {
			parts = append(parts, fmt.Sprintf("%s, %s", pt.base, pt.rdmanet))
		}
	}
	unit := r.unit
	if r.base != "TCP" {
		unit += " (" + r.base + ")"
	}
	return strings.Join(parts, "; ") + " " + unit
}

// escape returns text as it is written in XML.
func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // A strings.Builder never fails.
	return b.String()
}
