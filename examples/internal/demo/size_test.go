package demo

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{
		0:             "0 B",
		1023:          "1023 B",
		1024:          "1.0 KiB",
		1536:          "1.5 KiB",
		1 << 20:       "1.0 MiB",
		1 << 30:       "1.0 GiB",
		math.MaxInt64: "8.0 EiB",
	} {
		assert.Equal(t, want, Size(n))
	}
}

func TestRate(t *testing.T) {
	assert.Equal(t, "512.0 MiB/s", Rate(1<<30, 2*time.Second))
	assert.Equal(t, "at once", Rate(1<<30, 0))
}
