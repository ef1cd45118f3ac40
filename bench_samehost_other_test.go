//go:build !linux

package rdmanet_test

import (
	"errors"
	"time"
)

// BenchmarkSameHost runs on Linux only, so these are never called.

func placeProcess(int) (restore func() error, err error) { return nil, errors.ErrUnsupported }

func processorTime() (time.Duration, error) { return 0, errors.ErrUnsupported }
