package main

import (
	"bytes"
	"fmt"
	"time"
)

// The plot is two charts over the same time: throughput by direction, all
// connections together, and the least credits in hand, of every connection
// that has them.

const (
	plotWidth  = 900
	plotHeight = 220
	plotLeft   = 80
	plotTop    = 40
	plotGap    = 90
)

var plotColours = [...]string{"#1f6fb4", "#d1495b", "#3a7d44", "#8d5a97", "#c77c02", "#127475"}

// curve is a line in a chart.
type curve struct {
	name   string
	points []point
}

type point struct {
	at time.Duration
	v  float64
}

func (s *summary) plot() []byte {
	length := max(s.last.Sub(s.first), time.Millisecond)
	var sums [2]series
	var credits []curve
	for _, x := range s.order {
		if !s.filter.match(x.c) {
			continue
		}
		for i := range x.bytes {
			b := &x.bytes[i]
			for j, v := range b.bins {
				if b.set[j] {
					sums[i].add(time.Duration(j)*b.width, v, false)
				}
			}
			if k := &x.credits[i]; len(k.bins) > 0 && len(credits) < len(plotColours) {
				c := curve{name: fmt.Sprintf("#%d %s", x.c.ID, [2]string{"initiator", "responder"}[i])}
				for j, v := range k.bins {
					if k.set[j] {
						c.points = append(c.points, point{time.Duration(j) * k.width, v})
					}
				}
				credits = append(credits, c)
			}
		}
	}
	var rates []curve
	for i := range sums {
		c := curve{name: [2]string{"sent by initiators", "sent by responders"}[i]}
		for j, v := range sums[i].bins {
			c.points = append(c.points, point{time.Duration(j) * sums[i].width, v / 1e6 / sums[i].width.Seconds()})
		}
		rates = append(rates, c)
	}

	var b bytes.Buffer
	const height = plotTop + 2*plotHeight + 2*plotGap
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="sans-serif" font-size="12">`+"\n",
		plotLeft+plotWidth+40, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", plotLeft+plotWidth+40, height)
	chart(&b, plotTop, "Payload, MB/s", length, rates)
	chart(&b, plotTop+plotHeight+plotGap, "Credits in hand, lowest", length, credits)
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// chart draws curves into a box whose upper edge is at top.
func chart(b *bytes.Buffer, top int, title string, length time.Duration, curves []curve) {
	most := 0.0
	for _, c := range curves {
		for _, p := range c.points {
			most = max(most, p.v)
		}
	}
	if most == 0 {
		most = 1
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" font-weight="bold">%s</text>`+"\n", plotLeft, top-10, title)
	fmt.Fprintf(b, `<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#999"/>`+"\n", plotLeft, top, plotWidth, plotHeight)
	for i := range 5 {
		y := float64(top+plotHeight) - float64(plotHeight)*float64(i)/4
		fmt.Fprintf(b, `<path d="M%d %.1fh%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.4g</text>`+"\n",
			plotLeft, y, plotWidth, plotLeft-6, y+4, most*float64(i)/4)
		x := plotLeft + plotWidth*i/4
		fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle">%.4g s</text>`+"\n", x, top+plotHeight+16, length.Seconds()*float64(i)/4)
	}
	for i, c := range curves {
		colour := plotColours[i%len(plotColours)]
		fmt.Fprintf(b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", plotLeft+i*150, top+plotHeight+34, colour, c.name)
		if len(c.points) == 0 {
			continue
		}
		fmt.Fprintf(b, `<polyline fill="none" stroke="%s" points="`, colour)
		for _, p := range c.points {
			fmt.Fprintf(b, "%.1f,%.1f ", plotLeft+plotWidth*min(p.at.Seconds()/length.Seconds(), 1), float64(top+plotHeight)-float64(plotHeight)*max(p.v, 0)/most)
		}
		b.WriteString(`"/>` + "\n")
	}
	if len(curves) == 0 {
		fmt.Fprintf(b, `<text x="%d" y="%d" fill="#666">none</text>`+"\n", plotLeft+10, top+plotHeight/2)
	}
}
