//go:build linux && cgo

package rdmacore

/*
#cgo LDFLAGS: -ldl
#include "shim.h"
#include <stdlib.h>

#cgo noescape rn_cm_event
#cgo nocallback rn_cm_event
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"unsafe"
)

// library has what a process needs once: the two shared libraries, the event channel of the
// connection manager, and the devices that were opened. They stay open as long as the
// process lives.
type library struct {
	channel *C.struct_rn_event_channel

	// events is held while an event is taken from the channel, because librdmacm may then
	// change the state of the ID's queue pair. It is also held while the queue pair is
	// taken from the ID.
	events sync.Mutex

	mu       sync.Mutex
	devices  map[*C.struct_rn_context]*device
	unusable []unusable // unusable is of the time when devices were last listed.
}

var loaded struct {
	sync.Mutex
	lib *library // lib is nil until load has succeeded.
}

// load loads the libraries once. After a failure it tries again, because what was missing
// may have been installed since.
func load() (*library, error) {
	loaded.Lock()
	defer loaded.Unlock()
	if loaded.lib != nil {
		return loaded.lib, nil
	}
	if err := loadNamed("libibverbs.so.1", "librdmacm.so.1"); err != nil {
		return nil, err
	}
	lib := &library{devices: make(map[*C.struct_rn_context]*device)}
	if err := errno(C.rn_create_channel(&lib.channel)); err != nil {
		var list **C.struct_rn_context
		var n C.int
		if C.rn_devices(&list, &n) != 0 { // without any the library does not try
			return nil, noDevice(err)
		}
		C.rn_free_devices(list)
		return nil, channelError(err)
	}
	f, err := pollable(int(lib.channel.fd), "rdma_cm")
	if err != nil {
		return nil, fmt.Errorf("%s: wait for events of the connection manager: %w", Name, err)
	}
	go lib.watch(f)
	loaded.lib = lib
	return lib, nil
}

// loadNamed loads the two libraries. Their names are always the same, except in tests.
func loadNamed(verbs, cm string) error {
	var problem [256]C.char
	v, c := C.CString(verbs), C.CString(cm)
	defer C.free(unsafe.Pointer(v))
	defer C.free(unsafe.Pointer(c))
	if C.rn_load(v, c, &problem[0], C.size_t(len(problem))) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s: install rdma-core (Debian: apt-get install rdma-core ibverbs-providers librdmacm1; "+
		"others: rdma-core, libibverbs, librdmacm): %w", Name, C.GoString(&problem[0]), errors.ErrUnsupported)
}

// channelError adds advice to the error of a connection manager that cannot be opened.
func channelError(err error) error {
	advice := "load the module rdma_ucm (modprobe rdma_ucm)"
	if errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) {
		advice = "this user may not open /dev/infiniband/rdma_cm: give it the group that owns the file, often rdma"
	}
	return fmt.Errorf("%s: no connection manager: %w: %s", Name, err, advice)
}

// errno returns the error for a result of the shim.
func errno(rc C.int) error {
	if rc >= 0 {
		return nil
	}
	return syscall.Errno(-rc)
}

// pollable makes a file of a descriptor that does not block, for the runtime's poller. The
// file closes the descriptor.
func pollable(fd int, name string) (*os.File, error) {
	f := os.NewFile(uintptr(fd), name)
	if err := f.SetReadDeadline(noDeadline); err != nil {
		return nil, fmt.Errorf("%s cannot be polled: %w", name, err)
	}
	return f, nil
}

// handles numbers the objects that C must name, so that C never holds a pointer to them. A
// number is used once. The table keeps an object alive that the program has dropped.
var handles = struct {
	sync.RWMutex
	last C.uintptr_t
	m    map[C.uintptr_t]any
}{m: make(map[C.uintptr_t]any)}

func addHandle(v any) C.uintptr_t {
	handles.Lock()
	defer handles.Unlock()
	handles.last++
	handles.m[handles.last] = v
	return handles.last
}

func removeHandle(h C.uintptr_t) {
	handles.Lock()
	defer handles.Unlock()
	delete(handles.m, h)
}

func lookup(h C.uintptr_t) any {
	handles.RLock()
	defer handles.RUnlock()
	return handles.m[h]
}

// Provider has the devices of rdma-core with their connection manager. Use [New].
type Provider struct {
	cfg Config
	lib *library
}

// New loads rdma-core if it is not loaded yet. The devices and the event channel stay open
// until the process ends. The error says what to install, to load or to permit. Without the
// libraries, or without cgo, it matches errors.ErrUnsupported.
//
// New returns the concrete type, as iwarp.New does: a provider may have methods beyond
// those of [ibv.Provider], such as [Provider.Unusable].
func New(cfg Config) (*Provider, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if _, _, err := parseCCall(os.Getenv(ccallEnv)); err != nil {
		return nil, err
	}
	lib, err := load()
	if err != nil {
		return nil, err
	}
	return &Provider{cfg, lib}, nil
}

func (c *Config) check() error {
	if c.Retries < 0 || c.Retries > 7 || c.RNRRetries < 0 || c.RNRRetries > 7 {
		return fmt.Errorf("%s: Config.Retries and RNRRetries go from 0 to 7: %w", Name, syscall.EINVAL)
	}
	if c.AckTimeout < 0 || c.RNRTimer < 0 {
		return fmt.Errorf("%s: Config.AckTimeout and RNRTimer cannot be negative: %w", Name, syscall.EINVAL)
	}
	if c.PathMTU != 0 && !slices.Contains(mtus[1:], c.PathMTU) {
		return fmt.Errorf("%s: Config.PathMTU is one of %v: %w", Name, mtus[1:], syscall.EINVAL)
	}
	return nil
}
