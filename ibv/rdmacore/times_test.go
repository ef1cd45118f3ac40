package rdmacore

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestAckTimeout(t *testing.T) {
	for _, c := range []struct {
		d    time.Duration
		want int
	}{
		{1, 1},
		{8192 * time.Nanosecond, 1},
		{8193 * time.Nanosecond, 2},
		{time.Millisecond, 8},        // 1.049 ms
		{500 * time.Millisecond, 17}, // 0.537 s
		{4096 << 17, 17},             // on the dot
		{4096<<17 + 1, 18},
		{time.Hour, 30},        // 73 min
		{1000 * time.Hour, 31}, // the longest
	} {
		assert.Equal(t, c.want, ackTimeout(c.d), "%v", c.d)
	}
}

func TestRNRTimer(t *testing.T) {
	for _, c := range []struct {
		d    time.Duration
		want int
	}{
		{1, 1},
		{10 * time.Microsecond, 1},
		{11 * time.Microsecond, 2},
		{640 * time.Microsecond, 12},
		{641 * time.Microsecond, 13},
		{491520 * time.Microsecond, 31},
		{491521 * time.Microsecond, 0}, // 655.36 ms
		{655360 * time.Microsecond, 0},
		{time.Hour, 0}, // the longest
	} {
		assert.Equal(t, c.want, rnrTimer(c.d), "%v", c.d)
	}
}
